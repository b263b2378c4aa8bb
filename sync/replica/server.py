"""vLLM's API server on a port that its launcher holds: `python -m sync.replica.server FLAGS OF VLLM`."""

from __future__ import annotations

if __name__ == "__main__":
    from sync.replica.vllm_compat import serve_on_held_port

    serve_on_held_port()
