"""Seconds and bytes of publishing and staging full, delta and LoRA versions through every store, by one rank.

Also the models that are published, made on the spot. A server that a store needs runs on loopback, in its own
process. The bucket server is part of the tests, and moto of the development tools: without them the store is
skipped, with the reason.
"""

from __future__ import annotations

import importlib.util
import logging
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from statistics import median
from typing import Any, Final, Literal, NamedTuple

import numpy as np

from distill.bench.runner import ROOT, Figures
from sync.errors import ConfigError
from sync.publish import Publisher, PublishReport, Slice
from sync.snapshots import checkpoint
from sync.stores import Store
from sync.stores.directory import DirectoryStore
from sync.stores.xet import XetStore
from sync.subscribe import Mirror
from sync.wire import RunIdentity, Version

log = logging.getLogger(__name__)
RUN: Final = "bench"
CHANGED: Final = 0.01
"""Share of elements that move by one unit in the last place from version to version, as in post-training at a
learning rate of about 1e-6."""
CONTEXT: Final = 256
COUNT: Final = {"toy": 7, "large": 3}
"""Versions of each kind; medians are taken."""
Kind = Literal["full", "delta", "lora"]


# --- models -----------------------------------------------------------------------------------------------


class Shape(NamedTuple):
    """A Qwen3 in bf16 with random weights, and the load on its engine."""

    name: str
    hidden: int
    layers: int
    heads: int
    head_dim: int
    feed_forward: int
    vocabulary: int
    rank: int
    """Of its adapters."""
    in_flight: int
    """Completions of 12 tokens that the engine works on at any time."""
    window_seconds: float
    """Between two readings of the engine's throughput."""
    swaps: int
    """In a window that has some."""


TOY: Final = Shape("toy", 96, 2, 3, 32, 256, 29, rank=8, in_flight=256, window_seconds=4.0, swaps=8)
"""The quickstart's student, and its load."""
LARGE: Final = Shape("large", 768, 12, 12, 64, 2304, 20480, rank=32, in_flight=16, window_seconds=12, swaps=3)
"""101 M parameters."""


def make(shape: Shape, folder: Path) -> tuple[Path, Path]:
    """Model folder and adapter folder (all linear layers) of the shape; found where they were made before."""
    model, adapter = folder / f"model-{shape.name}", folder / f"adapter-{shape.name}"
    if not (model / "tokenizer.json").is_file():
        _make_model(shape, model)
    if not (adapter / "adapter_config.json").is_file():
        _make_adapter(shape, model, adapter)
    return model, adapter


def qwen3(vocabulary: int, hidden: int, layers: int, heads: int, head_dim: int, feed_forward: int) -> Any:
    """A Qwen3 in fp32 with random weights, without end token: completions have the requested length."""
    from transformers import Qwen3Config, Qwen3ForCausalLM

    config = Qwen3Config(
        vocab_size=vocabulary,
        hidden_size=hidden,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=max(1, heads // 2),
        head_dim=head_dim,
        intermediate_size=feed_forward,
        max_position_embeddings=CONTEXT,
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=None,
    )
    return Qwen3ForCausalLM(config)


def _make_model(shape: Shape, folder: Path) -> None:
    import torch
    from transformers.utils import logging as progress

    from distill.tasks.teaching import make_tokenizer

    progress.disable_progress_bar()
    torch.manual_seed(0)
    sizes = (shape.vocabulary, shape.hidden, shape.layers, shape.heads, shape.head_dim, shape.feed_forward)
    qwen3(*sizes).to(torch.bfloat16).save_pretrained(folder)
    make_tokenizer([f"w{i}" for i in range(shape.vocabulary)], "w[0-9]+", "w1", "w0").save_pretrained(folder)


def _make_adapter(shape: Shape, model: Path, folder: Path) -> None:
    import torch
    from transformers import AutoModelForCausalLM

    from student_trainer.config import LoRAConfig
    from student_trainer.engine import with_adapters

    base = AutoModelForCausalLM.from_pretrained(model, dtype=torch.bfloat16)
    with_adapters(base, LoRAConfig(rank=shape.rank), 0).save_pretrained(folder)
    (folder / "README.md").unlink(missing_ok=True)


class Versions:
    """Publishes versions of a folder, which it changes: version n is step n of lineage 0."""

    def __init__(self, folder: Path, store: Store) -> None:
        places = checkpoint.tensors(folder)
        self._folder, self._random, self._step = folder, np.random.default_rng(0), 0
        self._arrays: dict[str, Any] = checkpoint.bits(places, writable=True)
        slices = [Slice(n, at.shape, at.kind, 0, self._arrays[n].size) for n, at in places.items()]
        self._publisher = Publisher(store, RunIdentity(RUN, model=checkpoint.fingerprint(folder)), slices)

    def publish(self, kind: Kind) -> PublishReport:
        """The next version; a delta needs a full one before it."""
        version = Version(0, self._step)
        for array in self._arrays.values() if self._step else ():
            moved = self._random.integers(0, array.size, max(1, int(CHANGED * array.size)))
            array[moved] ^= 1
        self._step += 1
        if kind == "delta":
            return self._publisher.delta(version, self._arrays)
        return self._publisher.anchor(version, None, self._folder, self._arrays, kind)


# --- stores -----------------------------------------------------------------------------------------------

_SUPPORT: Final = ROOT / "tests" / "support"
_BUCKET_SERVER: Final = f"""
import sys
sys.path.insert(0, {str(_SUPPORT)!r})
import bucket_server
with bucket_server.serve() as hub:
    print(hub.base, flush=True)
    sys.stdin.read()
"""
_S3_SERVER: Final = """
import logging, sys, urllib.request
from moto.server import ThreadedMotoServer
logging.getLogger("werkzeug").disabled = True
server = ThreadedMotoServer("127.0.0.1", 0, verbose=False)
server.start()
address = "http://{}:{}".format(*server.get_host_and_port())
opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
opener.open(urllib.request.Request(address + "/bucket", method="PUT"))
print(address, flush=True)
sys.stdin.read()
server.stop()
"""


class Skipped(Exception):
    """This store cannot be opened here, for the reason given."""


@contextmanager
def opened(name: str, work: Path) -> Iterator[Store]:
    """An empty store whose files, if any, are in `work`. Raises Skipped."""
    if name in ("directory", "xet"):
        yield (DirectoryStore if name == "directory" else XetStore)(work / "store")
    elif name == "bucket":
        if not (_SUPPORT / "bucket_server.py").is_file():
            raise Skipped("the local bucket server is in tests/support: run from a source checkout")
        from sync.stores.bucket import BucketStore

        with _server(_BUCKET_SERVER, work / "bucket.log") as address:
            yield BucketStore("bench/weights", work.name, endpoint=address, token="none")
    else:
        if importlib.util.find_spec("moto") is None:
            raise Skipped("moto is missing: pip install 'onpolicy-distill[dev]'")
        try:
            from sync.stores.object_store import ObjectStore
        except ConfigError as error:
            raise Skipped(str(error)) from None
        with _server(_S3_SERVER, work / "s3.log") as address:
            options = {"endpoint": address, "region": "us-east-1"}
            options |= {"access_key_id": "key", "secret_access_key": "secret"}
            yield ObjectStore(f"s3://bucket/{work.name}", options)


@contextmanager
def _server(script: str, log_path: Path) -> Iterator[str]:
    """Address that the script prints; the script ends with its standard input."""
    with log_path.open("wb") as errors:
        process = subprocess.Popen(
            [sys.executable, "-P", "-c", script],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=errors,
            text=True,
        )
    with process:  # closes both pipes, then waits
        assert process.stdout is not None
        address = process.stdout.readline().strip()
        if not address:
            raise Skipped(f"its server did not start:\n{log_path.read_text()[-500:]}")
        yield address


# --- measurements -----------------------------------------------------------------------------------------


def run(full: bool, folder: Path) -> Figures:
    """Medians by store and kind, and why a store was left out; `full`: 101 M parameters, not the toy."""
    shape = LARGE if full else TOY
    model, adapter = make(shape, folder)
    transports: list[Figures] = []
    skipped: dict[str, str] = {}
    plans: tuple[tuple[Path, list[Kind]], ...] = ((model, ["full", "delta"]), (adapter, ["lora"]))
    for name in ("directory", "xet", "bucket", "s3"):
        try:
            for source, kinds in plans:
                with tempfile.TemporaryDirectory(dir=folder, prefix=f"{name}-") as work:
                    shutil.copytree(source, Path(work) / "folder")
                    with opened(name, Path(work)) as store:
                        transports += _measure(name, store, Path(work), kinds, COUNT[shape.name])
        except Skipped as reason:
            skipped[name] = str(reason)
        log.info("%s: %s", name, skipped.get(name, "done"))
    return {"transports": transports, "skipped": skipped}


_COLUMNS: Final[tuple[tuple[str, Callable[[PublishReport, Any], float]], ...]] = (
    ("bytes", lambda report, staged: report.bytes),
    ("read", lambda report, staged: staged.bytes_read),
    ("publish_seconds", lambda report, staged: report.seconds),
    ("stage_seconds", lambda report, staged: staged.seconds),
)
"""Staging is reading, decoding and verifying a version, until it can be swapped in."""


def _measure(name: str, store: Store, work: Path, kinds: list[Kind], count: int) -> Iterator[Figures]:
    versions = Versions(work / "folder", store)
    with Mirror(work / "mirror", store, RUN) as mirror:
        for kind in kinds:
            taken = []
            for _ in range(count):
                report = versions.publish(kind)
                staged = mirror.stage(report.version)
                mirror.promote(report.version)
                taken.append((report, staged))
            columns = {column: median(of(*one) for one in taken) for column, of in _COLUMNS}
            yield {"store": name, "kind": kind, **columns}
