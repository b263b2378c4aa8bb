"""A replica's updates and its routes, on an engine that records what it is called with."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import httpx
import pytest
from starlette.applications import Starlette

from sync import wire
from sync.base.errors import SnapshotError, StoreError
from sync.base.settings import ReplicaConfig
from sync.wire import Generated, GenerateRequest, Sampling, UpdateRequest, Version
from sync.wire.claims import Claim

pytestmark = [pytest.mark.engine, pytest.mark.filterwarnings("ignore")]


class Engine:
    """vLLM's client of an engine with one worker. Calls named in `failing` fail, a pause after it began."""

    errored = False

    def __init__(self) -> None:
        self.calls: list[str] = []
        self.failing: set[str] = set()
        self.dead_at = ""
        self.paused, self.label = False, "default"
        self.engine_core = self
        self.vllm_config = SimpleNamespace(
            cache_config=SimpleNamespace(enable_prefix_caching=False),
            kv_transfer_config=None,
            parallel_config=SimpleNamespace(world_size=1),
        )
        self.model_config = SimpleNamespace(get_vocab_size=lambda: 10, max_model_len=8)

    def _called(self, name: str) -> None:
        self.calls.append(name)
        if name == self.dead_at:
            from sync.vllm.vllm_compat import EngineDead

            raise EngineDead()
        if name in self.failing:
            raise Exception(f"Call to {name} method failed")  # of this type in vLLM

    async def pause_scheduler_async(self, mode: str, clear_cache: bool) -> None:
        self.paused = True
        self._called("pause")

    async def resume_scheduler_async(self) -> None:
        self._called("resume")
        self.paused = False

    async def update_weight_version(self, label: str) -> None:
        self._called("stamp")
        self.label = label

    async def generate(self, prompt: Any, params: Any, request_id: str, lora_request: Any) -> Any:
        """A token by the weights of a label that is not the project's, from the first prompt."""
        label = "of others" if request_id.startswith("first") else "default"
        one = {"token_ids": [3], "finish_reason": "length", "routed_experts": None}
        flat = SimpleNamespace(logprobs=[-1.0], token_ids=[3])
        spans = [SimpleNamespace(version=label, start=0, end=1)]
        yield SimpleNamespace(outputs=[SimpleNamespace(**one, logprobs=flat, weight_versions=spans)])

    async def collective_rpc(self, method: str, args: tuple[Any, ...] = ()) -> list[Any]:
        self._called(method)
        return [{"done": True, "bytes": 0, "error": None} if method == "distill_prepared" else None]


class Slots:
    """A mirror whose slots are names: every version is staged into the spare."""

    def __init__(self) -> None:
        self.live: Version | None = None
        self.spare: Version | None = None
        self.full = False

    def follow(self, run_id: str | None) -> None:
        pass

    def stage(self, version: Version) -> Any:
        self.spare = version
        return SimpleNamespace(path=Path("spare"), bytes_read=0)

    def holds(self, version: Version) -> bool:
        return version in (self.live, self.spare)

    def promote(self, version: Version) -> None:
        if version == self.live:
            return
        if self.full:
            raise StoreError("the mirror cannot be written")
        self.live, self.spare = version, self.live


@pytest.fixture
def engine() -> Engine:
    return Engine()


@pytest.fixture
def updater(engine: Engine, tmp_path: Path) -> Any:
    from sync.vllm.middleware import Updater

    config = ReplicaConfig(run="toy", store_path=tmp_path / "store", mirror=tmp_path / "mirror")
    made = Updater(engine, config, Claim(wire.RunIdentity("toy", "aa")))
    made._mirror.close()
    made._mirror = Slots()
    return made


def to(step: int, kv_on_swap: str = "recompute") -> UpdateRequest:
    return UpdateRequest(Version(0, step), kv_on_swap)


@pytest.mark.parametrize("shares", ["prefix cache", "KV connector"])
async def test_no_cache_is_kept_where_the_engine_would_give_it_to_new_requests(
    engine: Engine, updater: Any, shares: str
) -> None:
    engine.vllm_config.cache_config.enable_prefix_caching = shares == "prefix cache"
    engine.vllm_config.kv_transfer_config = object() if shares == "KV connector" else None
    with pytest.raises(SnapshotError, match="would share prefixes between versions"):
        await updater.update(to(1, "keep"))
    assert engine.calls == []
    assert (await updater.update(to(1))).version == Version(0, 1)


@pytest.mark.parametrize("failing", ["pause", "distill_apply", "stamp"])
async def test_an_engine_that_fails_in_a_swap_resumes_on_the_old_version(
    engine: Engine, updater: Any, failing: str
) -> None:
    await updater.update(to(1))
    engine.calls, engine.failing = [], {failing}
    with pytest.raises(SnapshotError, match=rf"L000-v00000002.* the old .*: .*{failing}"):
        await updater.update(to(2))
    assert not engine.paused
    assert engine.label == str(updater.version) == "L000-v00000001"
    assert ("distill_apply" in engine.calls) is ("distill_revert" in engine.calls) is (failing != "pause")
    engine.failing = set()
    assert (await updater.update(to(2))).version == updater.version == Version(0, 2)


async def test_a_swap_ends_paused_where_the_engines_process_ended(engine: Engine, updater: Any) -> None:
    from sync.vllm.vllm_compat import EngineDead

    engine.dead_at = "distill_apply"
    with pytest.raises(EngineDead):
        await updater.update(to(1))
    assert engine.calls[-1] == "distill_apply"


async def test_the_folder_that_is_served_is_never_staged_into(engine: Engine, updater: Any) -> None:
    mirror = updater._mirror
    await updater.update(to(1))
    mirror.full = True
    assert (await updater.update(to(2))).version == updater.version == Version(0, 2)
    assert (await updater.update(to(2))).bytes_read == 0
    for _ in range(2):
        with pytest.raises(StoreError, match="cannot be written"):
            await updater.update(to(3))
        assert (mirror.live, mirror.spare) == (Version(0, 1), Version(0, 2))
    assert not engine.paused
    mirror.full = False
    await updater.update(to(3))
    assert (mirror.live, mirror.spare) == (Version(0, 3), Version(0, 2))


def replica(
    engine: Engine, folder: Path, offered: dict[str, Any], patch: pytest.MonkeyPatch, **config: Any
) -> tuple[Any, httpx.AsyncClient]:
    """A replica's routes on `engine`, and a client of them."""
    from sync.vllm.middleware import ReplicaMiddleware

    settings = ReplicaConfig(run="toy", store_path=folder, mirror=folder / "mirror", **config)
    for name, value in settings.environment().items():
        patch.setenv(name, value)
    app = Starlette()
    app.state.engine_client = engine
    app.state.openai_serving_models = SimpleNamespace(lora_requests=offered)
    routes = ReplicaMiddleware(app)

    async def guarded(scope: Any, receive: Any, send: Any) -> None:
        await routes({**scope, "app": app}, receive, send)

    return routes, httpx.AsyncClient(transport=httpx.ASGITransport(guarded), base_url="http://replica")


@pytest.mark.parametrize("route", ["generate", "update"])
async def test_vllms_own_routes_offer_the_adapter_once_it_is_in_place(
    engine: Engine, tmp_path: Path, route: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    offered: dict[str, Any] = {}
    routes, client = replica(engine, tmp_path, offered, monkeypatch, lora_rank=4)
    async with client:
        assert (await client.get("/distill/v1/state")).status_code == 200
        assert offered == {}
        routes._updater._mirror.close()
        routes._updater._mirror = Slots()
        message = to(1) if route == "update" else GenerateRequest(Sampling(max_tokens=1), [])
        assert (await client.post(f"/distill/v1/{route}", content=wire.encode(message))).status_code == 200
    assert list(offered) == ["student"]
    assert ("distill_apply" if route == "update" else "distill_revert") in engine.calls


async def test_a_completion_by_weights_of_others_fails_alone(
    engine: Engine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    prompts = [wire.GeneratePrompt(id, [1, 2]) for id in ("first", "second")]
    asked = GenerateRequest(Sampling(max_tokens=1), prompts)
    routes, client = replica(engine, tmp_path, {}, monkeypatch)
    async with client:
        response = await client.post("/distill/v1/generate", content=wire.encode(asked))
    routes._updater._mirror.close()
    answers = {one.id: one for one in wire.frames(response.content, Generated | wire.GenerateFailed)}
    assert answers["first"].unusable
    assert "'of others' is not a version" in answers["first"].error
    assert answers["second"].spans == [wire.VersionSpan(Version(0, 0), 0, 1)]
