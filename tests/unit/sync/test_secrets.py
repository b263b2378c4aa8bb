"""Secrets by name, by shape and by value, and the way on which they reach the process that needs them."""

from __future__ import annotations

import logging
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from sync.base import secrets
from sync.base.address import url_problem
from sync.base.secrets import HIDDEN, environment, filled, found, hide, is_secret, redact


@pytest.fixture(autouse=True)
def none_known(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(secrets, "_known", set())


SECRET = """secret_access_key HF_TOKEN api-key password AWS_SESSION_TOKEN db_pwd pass smtp_pass api_keys
ACCESS_TOKENS auth Authorization proxy_auth cookie SLACK_WEBHOOK_URL sas url_sig"""
PLAIN = """max_tokens tokenizer stop_token_ids ssl-keyfile DISTILL_TOKEN_FILE PWD OLDPWD
max_num_batched_tokens batch_tokens author bypass sigma num_keys prefix"""


def test_names_of_secrets_are_told_from_those_of_other_things() -> None:
    assert [name for name in SECRET.split() if not is_secret(name)] == []
    assert [name for name in PLAIN.split() if is_secret(name)] == []


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("http://me:pa55@host:8000/v1", f"http://{HIDDEN}@host:8000/v1"),
        ("https://ghp_abc@host", f"https://{HIDDEN}@host"),
        ("http://me:p@55@host:8000/v1", f"http://{HIDDEN}@host:8000/v1"),
        ("https://a.net/c/b?sp=r&sig=a%2Bb&se=1", f"https://a.net/c/b?sp=r&sig={HIDDEN}&se=1"),
        ("Authorization: Basic bWU6cGE1NQ==", f"Authorization: Basic {HIDDEN}"),
        ("serve m --api-key t0psecret --port 1", f"serve m --api-key {HIDDEN} --port 1"),
        ("password: t0p, user: me", f"password: {HIDDEN}, user: me"),
        ("--hf-token=abc --seed=3", f"--hf-token={HIDDEN} --seed=3"),
        (
            "{'secret_access_key': 'abc', 'region': 'eu'}",
            f"{{'secret_access_key': '{HIDDEN}', 'region': 'eu'}}",
        ),
        ('"api_key": "abc"', f'"api_key": "{HIDDEN}"'),
        ("weights.store.options.account_key = 'a b'", f"weights.store.options.account_key = '{HIDDEN}'"),
        ("Authorization: Bearer abcdefgh123", f"Authorization: Bearer {HIDDEN}"),
        ("hf_abcdefghijklmnopqrst", HIDDEN),
        ("sk-abcdefghijklmnop", HIDDEN),
        ("AKIAIOSFODNN7EXAMPLE!", f"{HIDDEN}!"),
        ("eyJhbGciOiJI.eyJzdWIiOiIx.SflKxwRJSM", HIDDEN),
    ],
)
def test_what_looks_like_a_secret_is_hidden(text: str, shown: str) -> None:
    assert redact(text) == shown
    assert redact(shown) == shown
    assert not text.startswith("http") or url_problem(str(hide(text))) is None, "it can still be read"


@pytest.mark.parametrize(
    "text",
    [
        "basic authentication; --prompt-key names a column",
        "set --resume-key or leave it",
        "the last token: 5; its key: a",
        "at http://host:8000/a@b, later",
        "the form is section.key=value",
        "rollout.max_tokens = 12",
        "3.5 s a token: slow",
        "revision 7be3b1d0c9f8e7d6c5b4a39281706f5e4d3c2b1a",
    ],
)
def test_what_only_looks_like_a_secret_is_shown(text: str) -> None:
    assert redact(text) == text


def test_a_secret_that_was_found_once_is_hidden_wherever_it_turns_up() -> None:
    assert redact("denied for t0psecret") == "denied for t0psecret"
    hide({"options": {"secret_key": "t0psecret"}, "url": "http://me:passw0rd@host"})
    assert redact("denied for t0psecret, or passw0rd") == f"denied for {HIDDEN}, or {HIDDEN}"
    hide({"options": {"pad_token": "a"}})
    assert redact("a cat") == "a cat", "short values are not looked for in other words"


def test_secrets_travel_beside_the_file_and_are_put_back(monkeypatch: pytest.MonkeyPatch) -> None:
    tree = {
        "weights": {"store": {"options": {"secret_key": "t0psecret", "region": "eu"}}},
        "urls": ["http://a", "http://me:passw0rd@b"],
        "lists": [{"env": {"HF_TOKEN": "another"}}],
        "engine_args": {"password": 12345678, "max_num_batched_tokens": 2048, "return_token": True},
        "overrides": {"credentials": {"user": "nobody"}, "key": ""},
        "launcher_args": ["--seed", "3", "--api-key", "abc", "--host", "h"],
        "rollout": {"max_tokens": 12, "stop_token": "kept: this key is ours"},
    }
    assert found(tree) == {
        "/weights/store/options/secret_key": "t0psecret",
        "/urls/1": "http://me:passw0rd@b",
        "/lists/0/env/HF_TOKEN": "another",
        "/engine_args/password": 12345678,
        "/overrides/credentials/user": "nobody",
        "/launcher_args/3": "abc",
    }
    hidden: Any = hide(tree)
    assert not any(secret in str(hidden) for secret in ("t0psecret", "passw0rd", "another", "12345678"))
    assert hidden["overrides"] == {"credentials": {"user": HIDDEN}, "key": ""}
    for name, value in environment(tree).items():
        monkeypatch.setenv(name, value)
    assert filled(hidden) == tree
    assert environment(hidden | {"urls": []}) == {}, "what is hidden already is none"


CHILD = """
import logging, sys
from sync.base.secrets import redact_process, hide
logging.basicConfig(format="%(levelname)s %(message)s", stream=sys.stderr)
redact_process()
hide({"options": {"secret": "t0psecret"}})
log = logging.getLogger("x")
log.warning("GET %s took %d ms", "http://me:passw0rd@host", 12)
log.warning("key=%s of %s and %s", "t0psecret", "fr0m-environment", object)
try:
    raise ValueError("denied for t0psecret")
except ValueError:
    log.exception("failed")
log.warning("%d", "not a number: t0psecret")
print(open("/proc/self/cmdline").read().replace(chr(0), " "), sys.argv)
raise SystemError("uncaught t0psecret")
"""


def test_a_process_shows_no_secret_in_logs_tracebacks_and_command_line(tmp_path: Path) -> None:
    (tmp_path / "child.py").write_text(CHILD)
    done = subprocess.run(
        [sys.executable, tmp_path / "child.py", "--set", "weights.store.options.secret_access_key=0nthelin3"],
        env={"HF_TOKEN": "fr0m-environment", "PYTHONPATH": str(Path(__file__).parents[3])},
        capture_output=True,
        text=True,
        check=False,
    )
    said = done.stdout + done.stderr
    assert f"GET http://{HIDDEN}@host took 12 ms" in said
    assert f"ValueError: denied for {HIDDEN}" in said
    assert f"SystemError: uncaught {HIDDEN}" in said
    assert f"weights.store.options.secret_access_key={HIDDEN}" in done.stdout
    assert [s for s in ("passw0rd", "fr0m-environment", "0nthelin3") if s in said] == []
    assert said.count("t0psecret") == said.count('"not a number: t0psecret"'), "its source line alone"


def test_records_keep_the_arguments_that_formatters_want() -> None:
    said = "uvicorn.access", 20, "p", 1, '%s - "%s" %d', ("1.2.3.4", "/?api_key=abc", 200), None
    record = secrets._redacted(logging.LogRecord, *said)
    assert record.args == ("1.2.3.4", f"/?api_key={HIDDEN}", 200)
