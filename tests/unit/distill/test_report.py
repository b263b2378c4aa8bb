"""The picture, the page, the trace, the figures and the samples of a run."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
from browser import DESKTOP, PHONE, Size, look
from command import left
from matplotlib.figure import Figure
from small_config import make_config, run_of_letters
from trace_processor import Trace

from distill.buffer import Batch
from distill.evaluation.completions import file_of
from distill.metrics import samples
from distill.metrics.page import draw, draw_cost, middle_window, write_page
from distill.metrics.results import read_run
from distill.metrics.samples import QUARANTINE, SAMPLES, Quarantine, Sample, SampleFile, choose, read_samples
from distill.metrics.summary import before_and_after, longest_waits, use_of_tokens
from distill.metrics.timeline import Span
from distill.metrics.trace import write_trace
from distill.metrics.trackers import MetricsFile, log_all
from distill.record.rollout import Rollout
from distill.tasks.sort_letters import FIRST_LETTER_ID, letter_tokenizer
from sync.base.errors import DataError
from sync.base.jsonl import JsonLines, read_lines
from sync.wire import Scored, Version, pack


def write_run(folder: Path, steps: int = 30, passed: bool = True) -> None:
    folder.mkdir(parents=True)
    lines, spans = MetricsFile(folder / "metrics.jsonl"), JsonLines(folder / "timeline.jsonl")
    for step in range(steps + 1):
        if step:
            figures = {"train/reverse_kl": 1 / step, "train/tokens_total": step * 1e3, "buffer/age_mean": 2.0}
            figures |= {"buffer/age_max": 4.0, "perf/wait_seconds": 0.1, "perf/train_seconds": 0.2}
            lines.log(step, figures)
            spans.write(Span("trainer", "train", step, step + 0.2))
            spans.write(Span("student-0", "generate", step - 0.4, step + 0.1))
        if step % 10 == 0:
            lines.log(step, {"eval/reverse_kl": 1.0, **({"eval/pass_rate": step / 30} if passed else {})})
    lines.close()
    spans.close()


def test_the_time_of_a_step_is_drawn_beside_the_staleness() -> None:
    step = {"buffer/age_mean": 2.0, "buffer/age_max": 4.0, "perf/wait_seconds": 0.1}
    lines = [{"step": i, **step, "perf/train_seconds": 0.2, "perf/publish_seconds": 0.1} for i in (1, 2)]
    figure = Figure()
    draw_cost(figure.subplots(), lines)
    drawn = {line.get_label(): list(line.get_ydata()) for axes in figure.axes for line in axes.get_lines()}
    work = pytest.approx([0.3, 0.3])
    assert drawn == {"age, mean": [2.0, 2.0], "trainer works": work, "trainer waits": [0.1, 0.1]}


def test_a_run_that_was_cut_short_is_drawn_and_goes_on_after_its_last_whole_line(tmp_path: Path) -> None:
    write_run(tmp_path / "run", steps=1, passed=False)
    (tmp_path / "run" / "timeline.jsonl").write_text("")
    with (path := tmp_path / "run" / "metrics.jsonl").open("a") as file:
        file.write('{"step": 2, "rever')
    assert draw(read_run(tmp_path / "run")).is_file()
    sink = MetricsFile(path)
    sink.log(2, {"train/loss": 1.0})
    sink.close()
    assert [line["step"] for line in read_lines(path)] == [0, 1, 2]


def test_a_folder_without_figures_and_those_of_an_earlier_version_are_refused(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="name the folder of a run"):
        read_run(tmp_path)
    (tmp_path / "metrics.jsonl").write_text('{"step": 1, "time": 2.0, "staleness/mean": 1.0}\n')
    with pytest.raises(DataError, match=r"figure 'staleness/mean'.*rollout, teacher.*names\.py.*wrote it"):
        read_run(tmp_path)


def test_steps_that_a_resume_or_a_rollback_did_again_are_read_once(tmp_path: Path) -> None:
    """Killed after step 4, resumed at 2; rolled back to 3 from 5, and stopped after 4."""
    trained = [(0, 1), (0, 2), (0, 3), (0, 4), (1, 3), (1, 4), (1, 5), (2, 4)]
    lines = [{"step": step, "time": 1.0, "lineage": at, "train/loss": 1.0} for at, step in trained]
    evaluated = {"step": 2, "time": 2.0, "lineage": 0, "eval/reverse_kl": 0.5}
    lines[4:4] = [evaluated]  # it is later than the steps that were trained meanwhile
    (tmp_path / "metrics.jsonl").write_text("".join(f"{json.dumps(line)}\n" for line in lines))
    rows = read_run(tmp_path).metrics
    trained = [(row["lineage"], row["step"]) for row in rows if "train/loss" in row]
    assert trained == [(0, 1), (0, 2), (1, 3), (2, 4)]
    assert evaluated in rows


@pytest.mark.parametrize(
    ("name", "content", "why"),
    [
        ("metrics.jsonl", '{"time": 1.0}', "missing required field `step`"),
        ("metrics.jsonl", '{"step": 1, "time": 1.0, "train/loss": []}', "no number as train/loss of step 1"),
        ("timeline.jsonl", '{"role": "a", "what": "train", "start": 1.0}', "missing required field `end`"),
        ("summary.json", '{"steps": ', "truncated"),
        ("summary.json", "[]", "Expected `object`"),
    ],
)
def test_a_file_with_something_else_in_it_is_one_message(tmp_path, name: str, content: str, why: str) -> None:
    write_run(tmp_path / "run", 3)
    with (tmp_path / "run" / name).open("a") as file:
        file.write(f"{content}\n")
    with pytest.raises(DataError, match=rf"{name}.*{why}"):
        draw(read_run(tmp_path / "run"))


def test_the_window_lies_in_the_middle_of_the_training_and_not_between_two_starts_of_the_run() -> None:
    starts = [at + t for at in (100.0, 5e4) for t in range(100)]
    spans = [{"what": "train", "start": start, "end": start + 0.5} for start in starts]
    evaluated = {"what": "evaluate", "start": 0.0, "end": 99.0}
    assert middle_window([evaluated, *spans[:100]]) == pytest.approx((150.25 - 6.0, 150.25 + 6.0))
    start, end = middle_window(spans)
    assert [span for span in spans if start <= span["start"] and span["end"] <= end]
    assert end - start == pytest.approx(12.0)


def test_figures_go_to_every_sink_without_what_is_no_number(tmp_path: Path) -> None:
    sinks = [MetricsFile(tmp_path / name) for name in "mn"]
    log_all(sinks, Version(2, 3), {"a": 1, "b": None, "c": 0.5, "d": True})
    for sink, name in zip(sinks, "mn", strict=True):
        sink.close()
        line = json.loads((tmp_path / name).read_text())
        assert line.pop("time") > 0
        assert line == {"step": 3, "lineage": 2, "a": 1.0, "c": 0.5, "d": 1.0}


def not_json(word: str) -> float:
    raise AssertionError(f"{word} is not JSON")


def test_a_figure_that_is_not_finite_is_null_in_the_file_and_left_out_of_the_picture(tmp_path: Path) -> None:
    write_run(tmp_path / "run", steps=5)
    path = tmp_path / "run" / "metrics.jsonl"
    lines = MetricsFile(path)
    for figure in (math.nan, math.inf, -math.inf):
        figures = dict.fromkeys(("train/loss", "train/reverse_kl", "buffer/age_max"), figure)
        lines.log(6, figures | {"train/skipped": 1.0})
    lines.log(6, {"eval/reverse_kl": math.nan, "eval/pass_rate": 0.5})
    lines.close()
    read = [json.loads(line, parse_constant=not_json) for line in path.read_text().splitlines()]
    assert [line["train/loss"] for line in read[-4:-1]] == [None] * 3
    assert read[-2]["train/skipped"] == 1.0
    assert draw(read_run(tmp_path / "run")).is_file()


def test_the_table_shows_what_is_known() -> None:
    before, after = {"reverse_kl": 1.25, "pass_rate": 0.2}, {"reverse_kl": 0.17, "pass_rate": 0.815}
    summary: dict[str, Any] = {"before": before, "after": after}
    shown = [("reverse KL, nats per token", "1.250", "0.170"), ("pass rate", "20.0%", "81.5%")]
    assert before_and_after(summary) == shown
    summary["before"]["reward"], summary["after"]["reward"] = 0.2, 0.815
    assert len(before_and_after(summary)) == 2, "a reward of 0 or 1 is the pass rate"
    summary["after"]["reward"] = 0.75
    assert before_and_after(summary)[2] == ("reward", "0.200", "0.750")
    alone = {"before": None, "after": {"reverse_kl": 0.5, "pass_rate": None}}
    assert before_and_after(alone) == [("reverse KL, nats per token", "–", "0.500")]


SUMMARY = {
    "rollout": {"tokens_total": 12000, "dropped": {"too_old": 2}},
    "train": {"tokens_share": 0.9, "tokens_total": 10800},
    "seconds": {"distill": 3725.4},
    "perf": {
        "waited_seconds": {"trainer": {"replicas": 7.0, "teachers": 1.0}, "student-0": {"trainer": 3.0}},
        "idle_seconds": {"trainer": 9.0, "student-0": 4.0},
        "busy_seconds": {"trainer": 1.0, "student-0": 6.0},
    },
}


def test_use_of_tokens_and_longest_waits_are_one_line_each() -> None:
    assert use_of_tokens(SUMMARY) == "90.0% of 12,000 generated tokens were trained on; dropped 2 too_old"
    assert longest_waits(SUMMARY) == (
        "the trainer's next batch 7 s for replicas, student-0 3 s for trainer, "
        "the trainer's next batch 1 s for teachers; the trainer was idle for 90% of the time, "
        "limited by replicas: more of them would help (distill plan)"
    )
    busy = SUMMARY["perf"] | {"busy_seconds": {"trainer": 91.0}}
    assert longest_waits({**SUMMARY, "perf": busy}).endswith("; the trainer was idle for 9% of the time")


def test_the_page_of_a_run_needs_no_other_file_and_escapes_what_it_shows(tmp_path: Path) -> None:
    write_run(tmp_path / "a<b")
    (tmp_path / "a<b" / "config.json").write_text('{"x": "<script>"}')
    page = write_page([tmp_path / "a<b"], tmp_path / "report.html").read_text()
    assert "<h1>a&lt;b</h1>" in page
    assert "&lt;script&gt;" in page
    assert "<script" not in page
    assert 'src="data:image/png;base64,' in page
    assert "http" not in page
    assert "width=device-width" in page


def page_of(run: Path, **summary: Any) -> str:
    """The page of a run that has this summary."""
    (run / "summary.json").write_text(json.dumps({**SUMMARY, **summary}))
    return write_page([run], run.with_name("report.html")).read_text()


def test_held_out_completions_stand_beside_those_before_and_the_teachers(tmp_path: Path) -> None:
    read = {"ended": 0.25, "length_mean": 40.0, "length_p90": 48.0, "looping": 0.0, "distinct": 0.5}
    write_run(tmp_path / "run")
    sides = {name: {"version": f"L000-v0000000{n}"} for n, name in enumerate(("before", "after"))}
    for name in (*(side["version"] for side in sides.values()), "teacher"):
        path = file_of(tmp_path / "run", name, "held_out")
        path.parent.mkdir(parents=True)
        path.write_text(json.dumps({"index": 7, "prompt": "Say <b>", "completion": f"by {name}"}) + "\n")
    sides["before"] |= {"behaviour": read}
    sides["after"] |= {"behaviour": read | {"ended": 0.5}, "reference": read | {"ended": 0.75}}
    for summary in (sides, sides | {"after": {**sides["after"], "reference": None}}):
        page = page_of(tmp_path / "run", **summary)
        told = "75.0%" if summary is sides else "–"
        assert f"<tr><td>end</td><td>25.0%</td><td>50.0%</td><td>{told}</td></tr>" in page
        assert ("it generates none" in page) == (summary is not sides)
    texts = "".join(f"<td>{text}</td>" for text in ("by L000-v00000000", "by L000-v00000001", "by teacher"))
    assert f"<tr><td>Say &lt;b&gt;</td>{texts}</tr>" in page


def test_runs_are_compared_side_by_side(tmp_path: Path) -> None:
    for name, kl in {"one": 0.25, "two": 0.125}.items():
        write_run(tmp_path / name)
        (tmp_path / name / "summary.json").write_text(json.dumps({**SUMMARY, "after": {"reverse_kl": kl}}))
    page = write_page([tmp_path / "one", tmp_path / "two"], tmp_path / "compare.html").read_text()
    assert "<td>pass rate: after</td>" not in page
    assert "<tr><th></th><th>one</th><th>two</th></tr>" in page
    assert "<tr><td>reverse KL, nats per token: after</td><td>0.250</td><td>0.125</td></tr>" in page
    by_name = {"maths": {"reverse_kl": 0.25, "pass_rate": 0.5, "reward": 0.5}}
    sides = {"before": {"sources": by_name}, "after": {"sources": by_name | {"code": {"reverse_kl": 0.5}}}}
    sides["after"]["pass_rate"] = 0.5
    page = page_of(tmp_path / "one", **sides)
    columns = "<th>reverse KL, nats per token</th><th>pass rate</th><th>reward</th>"
    assert f"<th>Held out, by source</th>{columns}" in page
    assert "<td>maths</td><td>0.250 → 0.250</td><td>50.0% → 50.0%</td><td>0.500 → 0.500</td>" in page
    assert "<td>code</td><td>– → 0.500</td><td>– → –</td><td>– → –</td>" in page
    assert "<td>pass rate: after</td>" in page
    assert "by teacher" not in page
    assert "Named sets" not in page
    gsm8k = {"pass_at_1": {"value": 0.25}, "average": {"value": 0.3}, "majority": None}
    versions = [{"version": f"L000-v0000000{n}", "sets": {"gsm8k": gsm8k} if n else {}} for n in range(2)]
    page = page_of(tmp_path / "one", evaluations=versions)
    assert "<tr><th>Named sets</th><th>pass@1</th><th>avg@k</th><th>maj@k</th></tr>" in page
    assert page.count("<td>gsm8k, ") == 1
    assert "<td>gsm8k, L000-v00000001</td><td>25.0%</td><td>0.300</td><td>–</td>" in page
    with pytest.raises(DataError, match=r"holds no metrics\.jsonl"):
        write_page([tmp_path], tmp_path / "compare.html")


def test_perfetto_reads_every_span_on_a_track_of_its_role_and_kind_and_the_counters(tmp_path: Path) -> None:
    write_run(tmp_path / "run", steps=2)
    trace = Trace(write_trace(tmp_path / "run"))
    assert trace.problems() == []
    origin = 0.6  # the first span begins there
    spans = {("student-0", "generate"): (0.6, 1.6, 0.5), ("trainer", "train"): (1.0, 2.0, 0.2)}
    rows = [(*track, at, seconds) for track, (*both, seconds) in spans.items() for at in both]
    expected = [pytest.approx((role, what, what, at - origin, seconds)) for role, what, at, seconds in rows]
    assert [*trace.slices()] == expected
    joined = "counter join counter_track t on t.id = track_id"
    counters = trace.rows(f"select name, count(*) as samples from {joined} group by 1")
    names = "buffer/age_mean", "train/reverse_kl", "train/tokens_total"
    assert [*counters] == [(f"{name} value", 2) for name in names]


def test_spans_that_overlap_on_a_track_are_cut_and_none_is_dropped(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"holds no timeline\.jsonl"):
        write_trace(tmp_path)
    spans = JsonLines(tmp_path / "timeline.jsonl")
    for start, end in ((5.0, 7.0), (6.0, 6.5), (6.75, 8.0)):  # a late report, then two in time
        spans.write(Span("trainer", "train", start, end))
    spans.close()
    trace = Trace(write_trace(tmp_path))
    assert trace.problems() == []
    assert sorted(row[3:] for row in trace.slices()) == [(0.0, 2.0), (2.0, 0.0), (2.0, 1.0)]


# --- in a browser

LONG = 200
"""Tokens of a completion that no window holds in one line."""
SEEN = """{
    overflow: document.documentElement.scrollWidth - innerWidth,
    loaded: performance.getEntriesByType("resource").filter(one => !one.name.startsWith("data:")).length,
    pictures: [...document.images].map(one => [one.naturalWidth, one.getBoundingClientRect().width]),
    shades: [...document.querySelectorAll(".tokens span")].map(one => getComputedStyle(one).backgroundColor),
    size: parseFloat(getComputedStyle(document.body).fontSize),
}"""


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """Two runs with samples, one with pass rates."""
    folder = tmp_path_factory.mktemp("runs")
    letter_tokenizer().save_pretrained(folder / "student")
    found = [folder / "passing-run", folder / "other-run"]
    for run, passed in zip(found, (True, False), strict=True):
        write_run(run, passed=passed)
        after = {"reverse_kl": 0.25, "pass_rate": 0.5 if passed else None}
        evaluations = [{"version": "L000-v00000030", **after}]
        summary = {**SUMMARY, "after": after, "evaluations": evaluations, "versions": {"torch": "2"}}
        (run / "summary.json").write_text(json.dumps(summary))
        config = make_config(student={"path": str(folder / "student")})
        (run / "config.json").write_text(config.model_dump_json())
        lines, tokens = JsonLines(run / SAMPLES), [FIRST_LETTER_ID + i % 26 for i in range(LONG)]
        logp = [-1.0] * LONG, [-1.0 - (i % 4) for i in range(LONG)]
        lines.write(Sample("L000-v00000001", "0:1:0", 1, "t", [3], tokens, *logp, None, False, False))
        lines.close()
    return found


@pytest.mark.parametrize("count", [1, 2])
@pytest.mark.parametrize("size", [DESKTOP, PHONE])
def test_a_page_fits_its_window_and_shows_curves_and_coloured_samples_by_itself(
    runs: list[Path], tmp_path: Path, size: Size, count: int
) -> None:
    seen, console = look(write_page(runs[:count], tmp_path / "page.html"), size, SEEN)
    assert console == []
    assert seen["loaded"] == 0
    assert seen["overflow"] <= 0
    assert seen["size"] >= 16
    ((drawn, shown),) = seen["pictures"]
    assert drawn > 1000
    assert shown >= 800, "a label is too small to read, and the picture scrolls by itself"
    assert len(seen["shades"]) == LONG * count
    assert len(set(seen["shades"])) == 4


# --- samples of what is trained on


def letters(tokens: list[int]) -> str:
    """Id i is the i-th letter."""
    return "".join(chr(ord("a") + token) for token in tokens)


def sample(id: str, excess: list[float], truncated: bool = False) -> Sample:
    count = len(excess)
    theirs = [-nats for nats in excess]
    return Sample(
        "L000-v00000000", id, 1, "t", [0], [*range(count)], [0.0] * count, theirs, None, truncated, False
    )


def ids(samples: list[Sample]) -> str:
    return "".join(sample.id for sample in samples)


def test_the_worst_the_longest_and_the_truncated_come_first() -> None:
    all_ = [sample("a", [0.5, 0.5]), sample("b", [3.0], truncated=True), sample("d", [-0.5])]
    all_.append(msgspec.structs.replace(sample("c", [0.0] * 3), reward=1.0))
    orders = {"worst": 4, "longest": 1, "truncated": 5}
    assert [ids(choose(all_, order, count)) for order, count in orders.items()] == ["bacd", "c", "b"]


def test_a_token_is_coloured_by_what_the_teacher_finds_unlikely() -> None:
    text = samples.shown(sample("a", [0.0, 0.6, 5.0]), letters)
    assert text.plain.endswith("a\nabc")
    styles = {text.plain[span.start : span.end]: str(span.style) for span in text.spans}
    assert (styles["b"], styles["c"]) == ("khaki3", "white on red3")
    of_bytes = msgspec.structs.replace(sample("a", [0.0, 0.6, 0.0, 5.0]), tokens=[*"é✓".encode()][:4])
    text = samples.shown(of_bytes, lambda ids: bytes(ids).decode(errors="replace"))
    assert text.plain.endswith("é\ufffd")


def episode() -> Sample:
    """Two turns, ab and e, an environment's cd between and fg behind them."""
    one = sample("a", [0.5, 1.5, 9.0, 9.0, 4.0, 9.0, 9.0])
    return msgspec.structs.replace(one, own=((0, 2), (4, 5)), reward=1.0)


def test_of_an_episode_the_students_tokens_alone_have_a_divergence() -> None:
    one = episode()
    assert (one.own_length, one.reverse_kl) == (3, 2.0)
    assert "2 turns  3 tokens" in samples.figures(one)
    assert "reward 1" in samples.figures(one)
    plain = sample("b", [3.0])
    assert (ids(choose([one, plain], "worst", 2)), ids(choose([plain, one], "longest", 1))) == ("ba", "a")


def test_of_an_episode_it_is_shown_who_said_what() -> None:
    text = samples.shown(episode(), letters)
    assert text.plain.endswith("a\nstudent: ab\nenvironment: cd\nstudent: e\nenvironment: fg")
    styles = {text.plain[span.start : span.end]: str(span.style) for span in text.spans}
    assert (styles["b"], styles["cd"], styles["e"]) == ("black on khaki1", "dim", "white on red3")
    grey = '<span title="environment" style="color:#7b8794">{}</span>'
    page = samples.shaded(episode(), letters)
    assert [page.count(grey.format(text)) for text in ("cd", "fg")] == [1, 1]
    assert page.count("nats") == 3


def test_every_nth_batch_leaves_samples_of_what_was_trained_on_and_another_file_is_refused(tmp_path) -> None:
    file = SampleFile(tmp_path / SAMPLES, every=2, count=3)
    ids, logp = pack(np.arange(3, dtype="i4")), np.array([-0.5, -1.0, -0.25], "f4")
    told: dict[str, Any] = {"scored": Scored("", pack(logp * 2)), "own": ((0, 1), (2, 3))}
    for step in range(5):
        rollouts = [Rollout(f"{step}:{place}", 0, ids, ids, pack(logp), **told) for place in range(7)]
        file.write(Batch(Version(0, step), rollouts, [*range(7)], []))
    file.close()
    written = read_samples(tmp_path)
    assert [one.id for one in written] == [f"{step}:{place}" for step in (0, 2, 4) for place in (0, 2, 4)]
    last = written[-1]
    assert (last.version, last.age, last.own, last.tokens) == ("L000-v00000004", 4, told["own"], [0, 1, 2])
    assert (last.logprob, last.teacher_logprob) == (logp.tolist(), (logp * 2).tolist())
    (tmp_path / SAMPLES).write_bytes(msgspec.json.encode({"version": 3}) + b"\n")
    with pytest.raises(DataError, match=r"samples.jsonl:\d+: .*; the file was altered"):
        read_samples(tmp_path)


def test_what_was_quarantined_is_printed_newest_first_with_its_reason(tmp_path, capsys) -> None:
    config, tokenizer = run_of_letters(tmp_path), letter_tokenizer()
    lines = JsonLines(config.run_dir / QUARANTINE)
    for name, letters in {"0:1:0": "ab", "0:2:0": "cd"}.items():
        tokens = tokenizer.encode(letters)
        lines.write(Quarantine(name, tokenizer.encode("ba>"), tokens, "over_long", "cut at 2 tokens"))
    lines.close()
    assert left("samples", str(config.run_dir), "--order", "quarantined") == 0
    why = "over_long: cut at 2 tokens"
    first, second = (f"0:{row}:0  {why}\nba>\n{text}\n" for row, text in ((2, "cd"), (1, "ab")))
    assert capsys.readouterr().out == f"{first}\n{second}\n"
