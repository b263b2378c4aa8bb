"""On PYTHONPATH: vLLM's choice of an attention kernel finds a processor with AMX, and nothing else does.

Where there is none, an engine that takes the AMX kernel dies by SIGILL at its first tokens.
"""

import sys

import torch


def _seen_by_attention() -> bool:
    return sys._getframe(1).f_code.co_name == "_get_attn_isa"


torch.cpu._is_amx_tile_supported = _seen_by_attention
