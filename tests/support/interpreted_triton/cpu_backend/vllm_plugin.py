"""Loaded by vLLM in each of its processes."""


def register() -> None:
    """Let top-k and top-p be cut by vLLM's PyTorch code: the interpreter cannot run its kernel for them."""
    from vllm.v1.sample.ops import topk_topp_sampler

    topk_topp_sampler.apply_top_k_top_p_triton = topk_topp_sampler.apply_top_k_top_p_pytorch
