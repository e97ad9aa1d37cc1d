"""The memory that the frames of a kept exception hold, measured and given back.

A post-mortem needs the frames of the last exception, and those hold the tensors of their local variables. Tensors that
the rank's own names refer to as well are not counted: they stay when the frames go.
"""

from __future__ import annotations

import ctypes
import gc
import os
import sys
from collections.abc import Iterable, Iterator, Mapping
from typing import TYPE_CHECKING, NamedTuple

from meshbook.concurrency.background import run_in_background
from meshbook.errors.advice import advice
from meshbook.formatting import format_bytes
from meshbook.system.processes import resident_bytes

if TYPE_CHECKING:
    from types import FrameType

    from meshbook.shell.shell import KeptError, RankShell

DEPTH = 4
"""The depth to which containers in containers are searched."""
ITEMS = 100_000
"""The most values that are looked at."""
WORTH_BYTES = 1_000_000
"""The least memory that is worth a word."""

_libc = ctypes.CDLL(None)


def is_out_of_memory(error: BaseException) -> bool:
    """Whether the error is Python's or torch's own for a lack of memory."""
    if isinstance(error, MemoryError) or type(error).__name__ == "OutOfMemoryError":
        return True
    return type(error) is RuntimeError and "DefaultCPUAllocator: can't allocate memory" in str(error)


class Freed(NamedTuple):
    """The memory that one rank gave back."""

    ename: str
    """The class of the exception whose frames were freed; empty if none was kept."""
    held_bytes: int
    """The memory that its frames held."""
    resident_bytes: int
    """The memory by which the process is smaller."""
    device_bytes: int
    """The memory of CUDA devices that was given back, caches included."""


class HeldMemoryGauge:
    """The gauge of the memory that a rank's kept exception holds, measured once for each on a thread of its own."""

    def __init__(self) -> None:
        self._measured_at = -1.0
        self._bytes = 0

    def last(self, shell: RankShell) -> int:
        """Return the bytes; 0 where no exception is kept, and until the measurement is done."""
        kept = shell.last_error
        if kept is None:
            return 0
        if kept.at != self._measured_at:  # not the exception itself: we must not be what keeps it
            self._measured_at, self._bytes = kept.at, 0
            run_in_background(lambda: self._measure(shell))
        return self._bytes

    def _measure(self, shell: RankShell) -> None:
        kept = shell.last_error
        if kept is not None:
            try:
                found = held_bytes(kept.error, shell.namespace)
            except Exception:  # the rank goes on meanwhile, and frames are not made for being looked at
                found = 0
            if kept.at == self._measured_at:
                self._bytes = found


def free(shell: RankShell) -> Freed:
    """Free the last exception's frames and device caches; called on the main thread, between cells."""
    kept = shell.last_error
    ename = type(kept.error).__name__ if kept is not None else ""
    held = held_bytes(kept.error, shell.namespace) if kept is not None else 0
    resident, device = resident_bytes(os.getpid()), _reserved_bytes()
    del kept
    shell.forget_last_error()
    gc.collect()
    torch = sys.modules.get("torch")
    if torch is not None and torch.cuda.is_initialized():
        torch.cuda.empty_cache()
    if hasattr(_libc, "malloc_trim"):  # glibc
        _libc.malloc_trim(0)  # what was freed goes back to the system, where it stands at the end of a heap
    smaller = resident - resident_bytes(os.getpid())
    return Freed(ename, held, max(0, smaller), max(0, device - _reserved_bytes()))


def memory_advice(error: BaseException, before: KeptError | None, namespace: Mapping[str, object]) -> list[str]:
    """Return lines on the memory that kept frames held, for an out-of-memory error. before: the exception before it."""
    if not is_out_of_memory(error):
        return []
    lines = []
    if before is not None and (held := held_bytes(before.error, namespace)) >= WORTH_BYTES:
        kind = type(before.error).__name__
        lines.append(
            f"the frames of the {kind} before it, kept for a post-mortem, held {format_bytes(held)}; "
            "they are let go now: try again"
        )
    held = held_bytes(error, namespace)
    if held >= WORTH_BYTES or not lines:
        what = format_bytes(held) if held >= WORTH_BYTES else "little"
        lines.append(f"the frames of this error hold {what}; the next cell lets them go, or now: {advice().free}")
    return lines


def held_bytes(error: BaseException, namespace: Mapping[str, object]) -> int:
    """Return the bytes of tensors and arrays that only local variables of the exception's frames hold."""
    named = dict(_storages(list(namespace.values())))
    values = (value for frame in _frames(error) for value in list(frame.f_locals.values()))
    return sum(size for pointer, size in dict(_storages(values)).items() if pointer not in named)


def _frames(error: BaseException | None) -> Iterator[FrameType]:
    """Yield the frames of the exception and its causes, without module-level ones: those have the rank's own names."""
    seen: set[int] = set()
    while error is not None and id(error) not in seen:
        seen.add(id(error))
        entry = error.__traceback__
        while entry is not None:
            if entry.tb_frame.f_code.co_name != "<module>":
                yield entry.tb_frame
            entry = entry.tb_next
        error = error.__cause__ or error.__context__


def _storages(values: Iterable[object]) -> Iterator[tuple[int, int]]:
    """Yield (address, bytes) of the memory behind tensors and arrays, in containers, modules and optimizers too."""
    torch, numpy = sys.modules.get("torch"), sys.modules.get("numpy")
    left = [(value, 0) for value in values]
    seen: set[int] = set()
    while left and len(seen) < ITEMS:
        value, depth = left.pop()
        if id(value) in seen:
            continue
        seen.add(id(value))
        try:
            if torch is not None and isinstance(value, torch.Tensor):
                storage = getattr(value, "_local_tensor", value).untyped_storage()  # a DTensor's part on this rank
                yield storage.data_ptr(), storage.nbytes()
                left += [(value.grad, depth)] if value.is_leaf and value.grad is not None else []
            elif numpy is not None and isinstance(value, numpy.ndarray):
                yield value.ctypes.data, value.nbytes
            elif depth < DEPTH:
                left += [(inner, depth + 1) for inner in _inside(value)]
        except Exception:  # a tensor subclass or a container that does not want to be looked at
            continue


def _inside(value: object) -> list[object]:
    torch = sys.modules.get("torch")
    if isinstance(value, dict):
        return list(value.values())
    if isinstance(value, (list, tuple, set, frozenset)):
        return list(value)
    if torch is not None and isinstance(value, torch.nn.Module):
        return [*value.parameters(), *value.buffers()]
    if torch is not None and isinstance(value, torch.optim.Optimizer):
        return [value.state]
    return []


def _reserved_bytes() -> int:
    """Return the bytes of CUDA devices that torch has reserved."""
    torch = sys.modules.get("torch")
    if torch is None or not torch.cuda.is_initialized():
        return 0
    return sum(int(torch.cuda.memory_reserved(index)) for index in range(torch.cuda.device_count()))
