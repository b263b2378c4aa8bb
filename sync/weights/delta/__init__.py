"""Lossless deltas between versions of a checkpoint: `codec` of one tensor, `file` of all of them."""

from typing import Final

ESCAPE: Final = 255
"""Byte of a stream that refers to the next value of the wide stream beside it."""
