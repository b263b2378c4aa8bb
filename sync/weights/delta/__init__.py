"""Lossless deltas between versions of a checkpoint: `codec` of one tensor, `file` of all of them."""
