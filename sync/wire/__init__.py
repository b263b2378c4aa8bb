"""What crosses a process: every message, who sends it to whom, its lengths, its units, and what None means.

Bodies are msgpack. Every message carries its tag and `schema`; a reader refuses another schema.
Arrays are little-endian, row-major bytes with dtype and shape. Nothing here imports torch.

Letters in shapes: T completion tokens of one rollout, L prompt + completion tokens, K ids per position,
H teacher's hidden size, V vocabulary, R rows of a batch, C completion tokens of a batch (sum of T).
"""

from sync.wire.base import *  # noqa: F403
from sync.wire.evaluator import *  # noqa: F403
from sync.wire.replica import *  # noqa: F403
from sync.wire.teacher import *  # noqa: F403
from sync.wire.trainer import *  # noqa: F403
