"""Reward functions of reference answers: what each accepts, and which are refused before a run."""

from __future__ import annotations

import asyncio
import json
import math
import os
import re
import signal
import threading
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest
from byte_tokenizer import Letters
from small_config import make_config
from waiting import until

from distill.config.prompts import JsonlPrompts, TaskPrompts
from distill.prompts import rewards
from distill.prompts.reward_pool import MOST_WORKERS, RewardPool
from distill.prompts.rewards import Reward, is_prose, load_rewards, reward_source
from distill.prompts.rows import Row, RowReader
from distill.prompts.sources import PromptSplit, open_prompts
from distill.prompts.stream import Prompt
from distill.tasks.sort_letters import EOS_ID, LETTERS, letter_tokenizer
from distill.tasks.teaching import make_tokenizer
from sync.base.errors import ConfigError, DataError

EOS = 0


def open_rows(folder: Path, rows: list[dict[str, Any]], **prompts: Any) -> PromptSplit:
    path = folder / "prompts.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    config = make_config(prompts={"path": path, "template": "plain", **prompts}, evaluation={"prompts": 2})
    return open_prompts(config, Letters(), 64)


def rewarded(name: str, answer: str, completion: str) -> Reward:
    prompts = JsonlPrompts(type="jsonl", path=Path("p"), answer_field="gold", reward_fn=name)
    source = reward_source(prompts, Letters())
    prompt = Prompt("1", [1], "default", answer)
    return load_rewards(source.prompts)(prompt, source.read(prompt, [*Letters().encode(completion), EOS]))


@pytest.mark.parametrize(
    ("name", "answer", "right", "wrong"),
    [
        ("exact", "Paris", " Paris\n", "Paris."),
        ("exact", "Paris", "Paris", "paris"),
        ("contains", "Paris", "It is Paris.", "It is Parisian."),
        ("contains", "4", "2 + 2 = 4", "the result is 42"),
        ("contains", "5", "2 + 3 = 5", "it is 4.5"),
        ("contains", "a+b", "so (a+b) it is", "so aab it is"),
        ("number", "10 + 62 #### 72", "first 62, then the answer is 72.", "72 is not it, 71 is"),
        ("number", "1234.50", "$1,234.5", "$1,234.6"),
        ("number", "1,234", "1234 items", "1 and 234"),
        ("number", "-3", "x = -3", "x = 6-3"),
        ("number", "5", "5.0", "none at all"),
        ("number", "-5", "it is \u22125", "it is 5"),
        ("number", "-5", "-$5.00", "$5"),
        ("number", "1e-05", "0.00001", "5"),
        ("number", "2", "2", "1/2"),
        ("number", "45", "45 minutes", "at 3:45"),
        ("number", "72", "<<48+24=72>>72", "72\\pi"),
        ("contains", "4", "it is 4.", "it is 4.5"),
        ("contains", "0.5", "0.5, so", "10.5"),
        ("number", "9007199254740993", "9007199254740993", "9007199254740992"),
        ("math", "1/2", r"so it is $\frac{2}{4}$", r"so it is $\frac{1}{3}$"),
        ("math", r"\boxed{(x+1)^2}", r"thus \boxed{x^2+2x+1}", r"thus \boxed{x^2+2x}"),
        ("math", "72", r"the answer is \boxed{72}", r"72 at first, then \boxed{71}"),
        ("math", "10^{5000}", r"\boxed{10^{5000}+0}", r"\boxed{1}"),  # too long to be written
        ("math", "7" * 5000, rf"\boxed{{{'7' * 5000}}}", r"\boxed{7}"),
    ],
    ids=lambda text: text[:20],
)
def test_an_answer_is_right_or_wrong(name: str, answer: str, right: str, wrong: str) -> None:
    if name == "math":
        pytest.importorskip("math_verify")
    of_right, of_wrong = rewarded(name, answer, right), rewarded(name, answer, wrong)
    assert (of_right.value, of_wrong.value) == (1.0, 0.0)
    assert of_right.answer != of_wrong.answer or name == "contains", "which names none"


def test_a_check_that_math_verify_has_no_time_for_is_no_wrong_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    errors = pytest.importorskip("math_verify.errors")

    def at_once(seconds: float) -> None:
        if seconds:
            raise errors.TimeoutException

    monkeypatch.setattr(signal, "alarm", at_once)  # every clock of math-verify's runs out
    assert rewarded("math", "100000000!", "\\boxed{100000000!}").value == 1.0
    assert rewarded("math", "1/2", "\\boxed{0.5}").value == 1.0
    assert rewarded("math", "1/2", "\\boxed{0.6}").value == 0.0


def test_a_check_without_a_verdict_costs_its_completion_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    grader = pytest.importorskip("math_verify.grader")

    def fails(*_: object) -> bool:
        raise OverflowError("too large")

    monkeypatch.setattr(grader, "sympy_expr_eq", fails)
    assert rewarded("math", "x+1", "\\boxed{x+1}").value == 1.0, "the same text needs no sympy"
    problem = r"'math'.*has no verdict on '.*1\+x.*' for the reference 'x\+1' \(Over"
    with pytest.raises(DataError, match=problem):
        rewarded("math", "x+1", "\\boxed{1+x}")


@pytest.mark.parametrize(
    ("answer", "prose"),
    [
        ("The answer is 42", True),
        ("180 days", False),
        ("x = 3 or x = 5", False),
        (r"\text{Monday and Tuesday}", False),
        (r"\frac{1}{3} \cos x \sin y", False),
        (r"Therefore it is \boxed{42}", False),
    ],
)
def test_words_in_a_reference_answer_that_math_verify_takes_for_letters_are_named(
    answer: str, prose: bool, tmp_path: Path
) -> None:
    more = {"answer_field": "a", "reward_fn": "math", "template": "plain"}
    reader = RowReader(JsonlPrompts(type="jsonl", path=tmp_path / "x", **more), Letters(), 8)
    assert reader.prompt(Row("x:1", "1", {"prompt": "?", "a": answer})) is not None
    assert any("have words in their reference answer" in note for note in reader.notes) is prose
    assert not is_prose("exact", answer)


def test_math_without_its_package_is_refused_with_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rewards.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ConfigError, match=r"not installed: pip install 'onpolicy-distill\[math\]'"):
        rewarded("math", "1", "1")


def test_a_reward_function_reads_special_tokens_but_the_end() -> None:
    tokenizer = make_tokenizer(["<end>", "<call>", "</call>", *"abc"], ".", "<end>", "<end>")
    tokenizer.add_special_tokens({"additional_special_tokens": ["<call>", "</call>"]})
    prompts = JsonlPrompts(type="jsonl", path=Path("p"), answer_field="gold", reward_fn="exact")
    call = tokenizer.convert_tokens_to_ids(["<call>", "a", "c", "</call>"])
    for ids, stop in ((call, []), ([*call, 0], []), ([*call, 5], [5])):
        source = reward_source(prompts, tokenizer, stop)
        assert source.read(Prompt("1", [1]), ids) == "<call>ac</call>"


def test_equal_answers_have_equal_names_and_functions_without_answers_have_none() -> None:
    names = [rewarded("number", "72", said).answer for said in ("72", "it is 72.00", "1 or 7")]
    assert names == ["72", "72", "7"]
    assert rewarded("number", "72", "none").answer is None
    assert rewarded("exact", "a", " b ").answer == "b"
    assert rewarded("contains", "a", "b").answer is None


def test_rows_are_rewarded_if_a_reward_function_is_set(tmp_path: Path) -> None:
    rows = [{"prompt": f"{i}+1=", "gold": i + 1} for i in range(30)]
    split = open_rows(tmp_path, rows, answer_field="gold", reward_fn="number")
    reward_fn = load_rewards(split.rewards.prompts)
    for prompt in (split.train[0], split.held_out[0]):
        assert reward_fn(prompt, str(int(prompt.text.split("+")[0]) + 1)).value == 1.0
    assert open_rows(tmp_path, rows, answer_field="gold").rewards is None
    with pytest.raises(ConfigError, match=r"a reference answer: name its field in prompts\.answer"):
        open_rows(tmp_path, rows, reward_fn="number")


def length_of_answer(prompt: Prompt, completion: str) -> float:
    return len(prompt.answer or "") - len(completion) / 4


def returning(value: Any) -> Any:
    """A function of the user's that returns always the same."""
    return lambda prompt, completion: value


none, text, not_a_number, too_large_for_fp32 = map(returning, (None, "1", math.nan, 1e39))
infinite_in_half, half = returning(np.float16("inf")), returning(np.float32(0.5))
half_a_surrogate_pair = returning((True, "\ud83d"))


def only_short(prompt: Prompt, completion: str) -> bool:
    if len(completion) > 2:
        raise KeyError("long")
    return True


def for_other_trainers(solution_str: str, ground_truth: str) -> bool:
    return ground_truth in solution_str


def numpys_answer(prompt: Prompt, completion: str) -> tuple[bool, np.str_]:
    return True, np.str_(completion)


def test_a_function_of_the_users_reads_prompt_and_completion_and_may_return_numpys_types() -> None:
    assert rewarded(f"{__name__}:length_of_answer", "abc", "xy").value == 2.5
    assert rewarded(f"{__name__}:half", "x", "y").value == 0.5
    reward = rewarded(f"{__name__}:numpys_answer", "x", "y")
    assert (reward, type(reward.answer)) == (Reward(1.0, "y"), str), "a frame takes no subclass"


@pytest.mark.parametrize(
    ("reward_fn", "error", "message"),
    [
        ("closest", ConfigError, r"'closest' cannot be loaded .*say exact, contains, number, math, or"),
        ("no_such_module:reward_fn", ConfigError, r"cannot be loaded \(ModuleNotFoundError"),
        (f"{__name__}:missing", ConfigError, r"cannot be loaded \(AttributeError"),
        (f"{__name__}:EOS", ConfigError, r"EOS is a int and cannot be called"),
        (f"{__name__}:none", DataError, r"gave None for prompt 1.*a bool or a number within ±1e\+30"),
        (f"{__name__}:text", DataError, r"gave '1' for prompt 1"),
        (f"{__name__}:not_a_number", DataError, r"gave nan for prompt 1"),
        (f"{__name__}:too_large_for_fp32", DataError, r"gave 1e\+39 for prompt 1"),
        (f"{__name__}:infinite_in_half", DataError, r"gave np\.float16\(inf\) for prompt 1"),
        (f"{__name__}:half_a_surrogate_pair", DataError, r"gave \(True, '\\ud83d'\) for .* answer as text"),
        (f"{__name__}:for_other_trainers", ConfigError, r"takes \(solution_str, ground_truth\), and it"),
        (f"{__name__}:only_short", DataError, r"KeyError \('long'\) for prompt 1, .*'abc'.* it is called as"),
    ],
)
def test_a_reward_function_that_cannot_be_used_is_named(
    reward_fn: str, error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=message):
        rewarded(reward_fn, "a", "abc")


NONE = ["none", "1/2", "10^5", "2026-11-01", "1,5", "1.2.3", "\\frac12", "\\sqrt{2}", "5\\pi", "1{,}234"]


@pytest.mark.parametrize(
    ("reward_fn", "gold", "message"),
    [*(("number", gold, "'.*' ends on no decimal number") for gold in NONE), ("contains", " ", "is empty")],
)
def test_an_answer_that_nothing_can_equal_is_named_by_file_and_line(
    tmp_path: Path, reward_fn: str, gold: str, message: str
) -> None:
    rows = [{"prompt": "a", "gold": "1"}, {"prompt": "b", "gold": gold}]
    with pytest.raises(DataError, match=rf"prompts\.jsonl:2: the reference answer {message}"):
        open_rows(tmp_path, rows, answer_field="gold", reward_fn=reward_fn)


# --- worker processes

OF_MINE = """
import os, sys, time
def reward_fn(prompt, completion):
    print("noise on stdout")
    if prompt.answer == "hang":
        if prompt.text:
            open(prompt.text, "a").write("asked")
        time.sleep(1000)
    if prompt.answer.startswith("daemon"):
        if os.fork() == 0:
            os.setsid()
            if os.fork():
                os._exit(0)
            with open(f"{prompt.text}-{os.getpid()}", "w") as file:
                file.write(str(os.getpid()))
            os.replace(file.name, prompt.text)  # whole, whenever it is killed
        elif prompt.answer == "daemon of the dead":
            while not os.path.exists(prompt.text):
                time.sleep(0.01)
            os._exit(7)
        time.sleep(60)
        os._exit(0)
    if prompt.answer == "exit":
        os._exit(7)
    if prompt.answer == "once":
        marker = prompt.text
        if not os.path.exists(marker):
            open(marker, "w").close()
            os._exit(7)
    if prompt.answer == "raise":
        raise KeyError("no idea")
    return os.getpid(), completion
"""


@pytest.fixture
async def pool(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[RewardPool]:
    (tmp_path / "of_mine.py").write_text(OF_MINE)
    monkeypatch.syspath_prepend(tmp_path)
    section = {"reward_fn": "of_mine:reward_fn", "reward_timeout_seconds": 5.0}
    made = RewardPool(reward_source(JsonlPrompts(type="jsonl", path="p", **section), letter_tokenizer()))
    yield made
    await made.close()


def asking(answer: str, text: str = "") -> Prompt:
    return Prompt("7", [1], "default", answer, text)


async def test_user_code_runs_in_other_processes_and_what_it_prints_is_no_answer(pool: RewardPool) -> None:
    found = await asyncio.gather(*(pool.reward(asking("pid"), [3 + i, EOS_ID]) for i in range(20)))
    assert {one.answer for one in found} == {LETTERS[i] for i in range(20)}
    workers = {int(one.value) for one in found}
    assert os.getpid() not in workers
    assert 1 <= len(workers) <= MOST_WORKERS
    await pool.close()
    assert not any(psutil.pid_exists(worker) for worker in workers)


async def test_a_completion_that_nobody_waits_for_any_more_is_not_asked_about(
    pool: RewardPool, tmp_path: Path
) -> None:
    hang = asking("hang", str(tmp_path / "asked"))
    hanging = asyncio.create_task(pool.reward(hang, [3]))
    await asyncio.to_thread(until, (tmp_path / "asked").exists)
    left = [asyncio.create_task(pool.reward(hang, [3])) for _ in range(8)]
    await asyncio.sleep(0)
    for task in left:
        task.cancel()
    assert (await pool.reward(asking("pid"), [4])).answer == LETTERS[1]
    assert isinstance(hanging.exception(), DataError)
    assert (tmp_path / "asked").read_text() == "asked"


@pytest.mark.parametrize(
    ("answer", "problem"),
    [
        ("daemon", "more than 5 s for prompt 7, completion of 2 tokens and was killed"),
        ("daemon of the dead", "ended with status 7, twice"),
    ],
)
async def test_a_function_that_hangs_or_dies_ends_with_all_that_it_started_in_whatever_session(
    pool: RewardPool, tmp_path: Path, answer: str, problem: str
) -> None:
    marker = tmp_path / "forked"
    with pytest.raises(DataError, match=problem):
        await pool.reward(asking(answer, str(marker)), [3, EOS_ID])
    assert not psutil.pid_exists(int(marker.read_text())), "it is gone before its completion has failed"
    assert (await pool.reward(asking("pid"), [4])).answer == LETTERS[1], "the next ones go on"


async def test_a_worker_that_dies_is_replaced_and_its_completion_tried_once_more(
    pool: RewardPool, tmp_path: Path
) -> None:
    assert (await pool.reward(asking("once", str(tmp_path / "marker")), [5])).answer == LETTERS[2]
    with pytest.raises(DataError, match=r"the process of the reward function ended with status 7, twice"):
        await pool.reward(asking("exit"), [5])
    with pytest.raises(DataError, match=r"'of_mine:reward_fn' raised KeyError \('no idea'\) for prompt 7"):
        await pool.reward(asking("raise"), [5])


async def test_what_cannot_be_asked_costs_its_completion_and_the_next_ones_go_on(
    pool: RewardPool, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = [(asking("pid"), [4]), (asking("\ud83d"), [4]), (asking("pid"), [1 << 64]), (asking("pid"), [4])]
    rewards = asyncio.gather(*(pool.reward(*one) for one in asked), return_exceptions=True)
    before, not_text, no_id, behind = await asyncio.wait_for(rewards, 60)
    for unreadable, why in ((not_text, "UnicodeEncodeError"), (no_id, "OverflowError")):
        assert re.search(f"could not be asked about prompt 7, .*: {why}", str(unreadable))
    assert before.answer == behind.answer == LETTERS[1]

    def no_process(*_: object, **__: object) -> None:
        raise BlockingIOError("Resource temporarily unavailable")

    with monkeypatch.context() as patch:
        patch.setattr(asyncio, "create_subprocess_exec", no_process)
        for _ in range(2):  # its worker dies, then there is none
            with pytest.raises(DataError, match=r"BlockingIOError: Resource temporarily unavailable"):
                await pool.reward(asking("exit"), [5])
    assert (await pool.reward(asking("pid"), [4])).answer == LETTERS[1]


def test_a_function_is_tried_before_the_run_on_no_text_and_on_the_reference() -> None:
    def check(prompts: JsonlPrompts | TaskPrompts) -> str:
        return RewardPool(reward_source(prompts, letter_tokenizer())).check(asking("abc"))

    def of(function: str) -> JsonlPrompts:
        return JsonlPrompts(type="jsonl", path=Path("p"), reward_fn=f"{__name__}:{function}")

    assert check(of("length_of_answer")) == "the reward of no text is 3, of the text 'abc' 2.25"
    with pytest.raises(ConfigError, match=r"raised KeyError \('long'\) .*\(tried before the run\)"):
        check(of("only_short"))
    with pytest.raises(ConfigError, match=r"prompts\.task 'no_such_task' cannot be loaded"):
        check(TaskPrompts(type="task", task="no_such_task"))


@pytest.mark.parametrize("begun", [True, False])
def test_a_signal_ends_the_trial_of_a_function_that_hangs(pool: RewardPool, monkeypatch, begun: bool) -> None:
    """Also one that comes before the trial has begun in its thread."""
    source, told, loop = pool._source._replace(seconds=3600.0), threading.Event(), asyncio.new_event_loop()
    run = loop.run_forever

    def interrupt(*_: object) -> None:
        told.set()
        raise KeyboardInterrupt

    monkeypatch.setattr(loop, "run_forever", lambda: (begun or told.wait(60)) and run())
    monkeypatch.setattr(asyncio, "new_event_loop", lambda: loop)
    signal.signal(signal.SIGALRM, interrupt)
    signal.setitimer(signal.ITIMER_REAL, 2.0)
    try:
        with pytest.raises(KeyboardInterrupt):
            RewardPool(source).check(asking("hang"))
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0.0)
        signal.signal(signal.SIGALRM, signal.SIG_DFL)
