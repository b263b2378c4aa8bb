from typing import Any, NoReturn

from triton.backends.compiler import BaseBackend, GPUTarget


class Nothing(BaseBackend):
    """What Triton asks of a compiler, none of which happens."""

    @staticmethod
    def supports_target(target: GPUTarget) -> bool:
        return target.backend == "cpu"

    def _compile(self) -> NoReturn:
        raise RuntimeError("a kernel was to be compiled for a CPU: set TRITON_INTERPRET=1")

    def hash(self) -> str:
        return "interpreted"

    def parse_options(self, options: dict[str, Any]) -> NoReturn:
        self._compile()

    def add_stages(self, stages: dict[str, Any], options: Any, language: Any) -> NoReturn:
        self._compile()

    def load_dialects(self, context: Any) -> NoReturn:
        self._compile()

    def get_module_map(self) -> dict[str, Any]:
        return {}
