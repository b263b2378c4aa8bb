"""Every figure of a run: its one name, its unit and what it means.

metrics.jsonl, wandb and TensorBoard use these names, and metrics of Prometheus follow from them; summary.json
nests them: `buffer/age_mean` is summary["buffer"]["age_mean"]. `make docs` makes a page of them.
"""

from __future__ import annotations

import re
from typing import Final, NamedTuple

SECTIONS: Final = ("rollout", "teacher", "buffer", "train", "sync", "perf", "eval")


class Figure(NamedTuple):
    """One row. Words in capitals stand for a name: of a teacher, a role, a reason, an evaluation's set."""

    name: str
    unit: str
    meaning: str

    def names(self, name: str) -> bool:
        """Whether `name` is one of this row's."""
        return re.fullmatch(re.sub(r"\b[A-Z]+\b", "[^/]+", self.name), name) is not None


REVERSE_KL: Final = (
    "exact for `full`, `jsd` and `skew`, a lower bound for `forward_topk`; else an estimate, unbiased while "
    "no weight is capped"
)
FIGURES: Final = tuple(
    Figure(*row)
    for row in (
        ("rollout/issued", "rollouts", "prompts given out"),
        ("rollout/scored", "rollouts", "completions with their teacher's scores; without one, rewarded"),
        ("rollout/batched", "rollouts", "issued = batched + dropped + open, if no context is rewritten"),
        ("rollout/open", "rollouts", "in flight, in scoring or in the buffer"),
        ("rollout/late", "rollouts", "trained at a weight below 1"),
        ("rollout/in_flight", "rollouts", "being generated now"),
        ("rollout/replicas", "replicas", "serving now"),
        ("rollout/dropped/REASON", "rollouts", "not trained on"),
        ("rollout/dropped_tokens/REASON", "tokens", "generated for them"),
        ("rollout/requeued/REASON", "rollouts", "generated again"),
        ("rollout/tokens_total", "tokens", "of all completions, generated"),
        ("rollout/tokens_total_by_teacher", "tokens", "those that teachers generated"),
        ("rollout/turns", "turns", "of an episode, mean; left out where there is none"),
        ("rollout/environment_tokens", "tokens", "of environments, behind the first prompt; in no loss"),
        ("teacher/NAME/requests", "requests", "answered"),
        ("teacher/NAME/sequences", "sequences", "scored or generated"),
        ("teacher/NAME/refused", "sequences", "refused by the teacher"),
        ("teacher/NAME/tokens", "tokens", "prompt and completion; of generation, as many as were allowed"),
        ("teacher/NAME/seconds", "seconds", "sum over requests, retries included"),
        ("teacher/NAME/received_bytes", "bytes", "of its answers"),
        ("buffer/size", "rollouts", "scored and in no batch, now"),
        ("buffer/depth", "batches", "that may be outstanding beyond the next one, now"),
        ("buffer/age_mean", "versions", "age of the batch's rollouts when it was formed"),
        ("buffer/age_max", "versions", "of the oldest of them"),
        ("buffer/age_limit", "versions", "bound of the age; in summary.json alone"),
        ("train/loss", "–", "of the step, divided by its denominator"),
        ("train/reverse_kl", "nats per token", REVERSE_KL),
        ("train/reverse_kl/NAME", "nats per token", "over tokens that this one of several teachers scored"),
        ("train/student_entropy", "nats per token", "of the student's distribution"),
        ("train/teacher_entropy", "nats per token", "of the teacher's, if its engine sends what it takes"),
        ("train/student_end", "share", "the student's probability of ending at a token, their mean"),
        ("train/teacher_end", "share", "the teacher's at the same tokens; of top-k scores what they hold"),
        ("train/student_mass", "share", "the student's probability mass on the top-k"),
        ("train/teacher_mass", "share", "the teacher's probability mass on the top-k"),
        ("train/mask_mass", "share", "the student's probability mass on what a token was sampled from"),
        ("train/topk_overlap", "share", "of the teacher's top-k in the student's own"),
        ("train/rho_mean", "–", "importance ratio before the cap"),
        ("train/rho_max", "–", "highest importance ratio before the cap"),
        ("train/effective_sample_size", "share of tokens", "of the importance weights before the cap"),
        ("train/mismatch_kl", "nats per token", "KL(μ‖p) on tokens sampled from the weights of the step"),
        ("train/score_gap", "nats", "between the teacher's dense and sampled scores"),
        ("train/age_mean", "versions", "age of the tokens when they were trained on"),
        ("train/age_max", "versions", "of the oldest token"),
        ("train/truncation_rate", "share", "completions cut off at the token limit"),
        ("train/eos_rate", "share", "completions that ended by themselves"),
        ("train/tokens", "tokens", "completion tokens of the step, without those of environments"),
        ("train/tokens_by_teacher", "tokens", "those that teachers generated"),
        ("train/tokens_per_slot", "share", "of the positions computed, those of a token, prompts included"),
        ("train/rows", "rollouts", "of the step"),
        ("train/rescored", "rollouts", "of the step, whose kept scores were gone and computed again"),
        ("train/reward_mean", "–", "task reward of the step"),
        ("train/reward_std", "–", "its standard deviation over the step's rollouts"),
        ("train/grad_norm", "–", "before clipping"),
        ("train/lr", "–", "learning rate that the step used"),
        ("train/skipped", "0 or 1", "the update was left out: its loss or gradient norm was not finite"),
        ("train/tokens_total", "tokens", "trained on since the start of the run; whole rollouts count"),
        ("train/tokens_total_by_teacher", "tokens", "those that teachers generated"),
        ("train/tokens_share", "share", "of the generated tokens that was trained on"),
        ("train/starts", "starts", "of the trainer"),
        ("sync/versions", "versions", "published"),
        ("sync/updates", "updates", "of replicas"),
        ("sync/bytes_full", "bytes", "of a full snapshot"),
        ("sync/bytes_delta", "bytes", "of a delta or an adapter"),
        ("sync/bytes_read", "bytes", "read by a replica for an update"),
        ("sync/publish_seconds", "seconds", "to publish a version"),
        ("sync/stage_seconds", "seconds", "to stage it while generation continues"),
        ("sync/pause_seconds", "seconds", "generation paused"),
        ("sync/apply_seconds", "seconds", "to load it, part of the pause"),
        ("sync/total_seconds", "seconds", "from the request of an update to the reply"),
        ("sync/step", "steps", "of the version that the newest update of a replica loaded, now"),
        ("sync/bytes", "bytes", "read for that update"),
        ("sync/seconds", "seconds", "from its request to the reply"),
        ("perf/wait_seconds", "seconds", "of the step, the trainer idle until its batch arrived"),
        ("perf/train_seconds", "seconds", "of the step, forward and backward passes and the update"),
        ("perf/forward_seconds", "seconds", "of these, the forward passes of rank 0"),
        ("perf/backward_seconds", "seconds", "of these, its backward passes, with what ranks exchange"),
        ("perf/optimizer_seconds", "seconds", "of these, its share of the update"),
        ("perf/publish_seconds", "seconds", "of the step, the trainer blocked by publishing"),
        ("perf/checkpoint_seconds", "seconds", "of the step, to save a checkpoint"),
        ("perf/run_seconds", "seconds", "of all starts, each from its trainer's first hello"),
        ("perf/busy_seconds/ROLE", "seconds", "with work, in all starts"),
        ("perf/idle_seconds/ROLE", "seconds", "without work; roles overlap"),
        ("perf/waited_seconds/ROLE/CAUSE", "seconds", "blocked, by what it was blocked on"),
        ("eval/reverse_kl", "nats per token", "held-out prompts, temperature 1; left out without a teacher"),
        ("eval/reverse_kl_error", "nats per token", "its standard error; left out where it is exact"),
        ("eval/pass_rate", "share", "held-out completions that pass, from `pass_threshold` on"),
        ("eval/reward", "–", "of held-out completions, mean"),
        ("eval/source/SOURCE/reverse_kl", "nats per token", "of the prompts of one of several data sources"),
        ("eval/source/SOURCE/pass_rate", "share", "of their completions, those that pass"),
        ("eval/source/SOURCE/reward", "–", "of their completions, mean"),
        ("eval/teacher/NAME/reverse_kl", "nats per token", "where one of several teachers scores"),
        ("eval/teacher/NAME/pass_rate", "share", "of those completions that pass"),
        ("eval/teacher/NAME/reward", "–", "of those completions, mean"),
        ("eval/truncated", "share", "held-out completions cut off at the token limit"),
        ("eval/ended", "share", "held-out completions that ended by themselves"),
        ("eval/length_mean", "tokens", "of a held-out completion"),
        ("eval/length_p90", "tokens", "of a held-out completion, the 90th percentile"),
        ("eval/looping", "share", "held-out completions whose end repeats itself"),
        ("eval/distinct", "share", "of their runs of four tokens, those that differ"),
        ("eval/reference/ended", "share", "the teacher's own completions of these prompts that ended"),
        ("eval/reference/length_mean", "tokens", "of one of them"),
        ("eval/reference/length_p90", "tokens", "of one of them, the 90th percentile"),
        ("eval/reference/looping", "share", "those whose end repeats itself"),
        ("eval/reference/distinct", "share", "of their runs of four tokens, those that differ"),
        ("eval/best", "0 or 1", "the best evaluation so far"),
        ("eval/SET/pass_at_1", "share", "mean over prompts of the share of completions that pass"),
        ("eval/SET/average", "–", "avg@k, the mean reward"),
        ("eval/SET/majority", "share", "maj@k, where the reward function names answers"),
    )
)
"""Counts and tokens without "of the step" or "now" are sums since the start of the run. Bytes and seconds of
sync/ are medians over the newest versions and updates."""

HELD_OUT: Final = (
    ("reverse KL, nats per token", "reverse_kl", ".3f"),
    ("pass rate", "pass_rate", ".1%"),
    ("reward", "reward", ".3f"),
)
"""Title, figure of an evaluation, form."""
SETS: Final = (("pass@1", "pass_at_1", ".1%"), ("avg@k", "average", ".3f"), ("maj@k", "majority", ".1%"))
"""Title, figure of a named set, form of its value."""
BEHAVIOUR: Final = (
    ("end", "behaviour.ended", ".1%"),
    ("tokens, mean", "behaviour.length_mean", ".1f"),
    ("tokens, 90th percentile", "behaviour.length_p90", ".0f"),
    ("repeat themselves", "behaviour.looping", ".1%"),
    ("distinct runs of four", "behaviour.distinct", ".1%"),
)
"""Title, place in an evaluation, form: how held-out completions read."""
