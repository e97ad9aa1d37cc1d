"""Cells and ranks without collectives: both raise at once where a collective would wait for ever. Imports no torch.

A cell that runs on some ranks alone promises to do without collectives, since one that only some ranks enter never
ends: inside `collectives_off` each raises. A peek (`meshbook.worker.peek`) promises it too, inside
`collectives_refused`. C++ process groups are reached through the dispatcher, where a mode refuses their operations; a
process group written in Python is called directly and has to ask `refuse_if_off` itself.

Ranks of a mesh that was spawned without torch have `NoGroups` in place of process groups.
"""

from __future__ import annotations

import contextlib
import sys
import threading
from collections.abc import Iterator
from functools import lru_cache
from typing import TYPE_CHECKING, NoReturn

from meshbook.concurrency import forks
from meshbook.concurrency.background import peeking, refuse_in_peek
from meshbook.errors import UsageError
from meshbook.groups.progress import Collectives

if TYPE_CHECKING:
    from meshbook.torch_internals import OpOverload, TorchDispatchMode

_NAMESPACES = frozenset({"c10d", "_c10d_functional", "_c10d_functional_autograd"})
_LOCAL_OPERATIONS = frozenset({"wait_tensor"})
"""Functional operations that speak to no other rank."""

_PUBLIC_NAMES = {
    "allreduce": "all_reduce",
    "allreduce_coalesced": "all_reduce_coalesced",
    "allgather": "all_gather",
    "allgather_coalesced": "all_gather_coalesced",
    "_allgather_base": "all_gather_into_tensor",
    "all_gather_single": "all_gather_into_tensor",
    "all_gather_single_coalesced": "all_gather_into_tensor_coalesced",
    "allgather_into_tensor_coalesced": "all_gather_into_tensor_coalesced",
    "_reduce_scatter_base": "reduce_scatter_tensor",
    "reduce_scatter_single": "reduce_scatter_tensor",
    "reduce_scatter_single_coalesced": "reduce_scatter_tensor_coalesced",
    "reduce_scatter_tensor_coalesced": "reduce_scatter_tensor_coalesced",
    "alltoall": "all_to_all",
    "alltoall_base": "all_to_all_single",
    "_end_coalescing": "batch of operations",
    "recv_any_source": "recv",
}
"""Names of the dispatcher's operations where they are not those of ``torch.distributed``."""


def public_name(operation: str) -> str:
    """Name an operation of a process group as ``torch.distributed`` does."""
    return _PUBLIC_NAMES.get(operation, operation)


class Refusals:
    """The reasons for which this process refuses collectives now."""

    def __init__(self) -> None:
        self.may_refuse = False
        """Whether `refuse_if_off` might raise; for who asks before each operation, where a call costs more."""
        self._depth = 0
        self._parent: int | None = None

    def refuse_if_off(self, operation: str) -> None:
        """Raises: UsageError while collectives are off, or in a child of a rank. operation: its name for people."""
        if peeking:
            refuse_in_peek(operation)
        if self._depth:
            _refuse(operation)
        if self._parent is not None:
            forks.refuse_inherited(self._parent)

    def leave_to_parent(self, generation: int) -> None:
        """Refuse collectives in a child that a rank of this `forks.generation` has forked: the groups are its own."""
        self._parent, self.may_refuse = generation, True

    @contextlib.contextmanager
    def collectives_refused(self) -> Iterator[None]:
        """Have each collective of the calling thread raise PeekRefused in the block; other threads have theirs."""
        thread = threading.get_ident()
        with _refusing_mode()() if "meshbook.torch_internals" in sys.modules else contextlib.nullcontext():
            before, self.may_refuse = self.may_refuse, True
            peeking.add(thread)
            try:
                yield
            finally:
                peeking.discard(thread)
                self.may_refuse = before

    @contextlib.contextmanager
    def collectives_off(self) -> Iterator[None]:
        """Have each collective of the calling thread, and of its backward passes, raise UsageError in the block."""
        with _refusing_mode()():
            self._depth, self.may_refuse = self._depth + 1, True
            try:
                yield
            finally:
                self._depth -= 1
                self.may_refuse = bool(self._depth) or self._parent is not None


refusals = Refusals()
refuse_if_off, leave_to_parent = refusals.refuse_if_off, refusals.leave_to_parent
collectives_off, collectives_refused = refusals.collectives_off, refusals.collectives_refused


def _refuse(operation: str) -> NoReturn:
    refuse_in_peek(operation)
    raise UsageError(
        f"collectives are off in this cell (--no-collective): {operation}. "
        "Run it on all ranks without that option, or take the collective out of the cell."
    )


@lru_cache(maxsize=1)
def _refusing_mode() -> type[TorchDispatchMode]:
    from meshbook.torch_internals import TorchDispatchMode

    class RefusingMode(TorchDispatchMode):  # type: ignore[no-untyped-call]
        def __torch_dispatch__(
            self,
            func: OpOverload[..., object],
            types: object,
            args: tuple[object, ...] = (),
            kwargs: dict[str, object] | None = None,
        ) -> object:
            if func.namespace in _NAMESPACES:
                name = func.overloadpacket.__name__.rstrip("_")
                if name not in _LOCAL_OPERATIONS:
                    _refuse(public_name(name))
            return func(*args, **(kwargs or {}))

    return RefusingMode


WITHOUT_TORCH = (
    "this mesh was spawned without torch, so its ranks have no process groups and no collectives. Spawn one that has: "
    "without torch=False, or without --no-torch."
)


class NoGroups:
    """The part of `meshbook.groups.rank_groups.RankGroups` that ranks without torch are asked for."""

    formed = destroyed = False
    moved_bytes = 0

    def require(self, *_args: object, **_options: object) -> NoReturn:
        raise UsageError(WITHOUT_TORCH)

    form = prove = device_mesh = require

    def prepare(self, *_args: object, **_options: object) -> None:
        """Do nothing: the ranks do not meet, and have no groups to look after."""

    keep_environment = ask_of_actors = on_new_controller = note_failed = log_operations = prepare
    abort = hold_deadlines = interrupt_backward = prepare

    def tell(self) -> bytes:
        return b""

    def waits_in(self, thread: int) -> str:
        return ""

    def waited_s(self, thread: int) -> float:
        return 0.0

    def collectives(self, call: int, *, recent: int = 0, look_deeper: bool = False) -> Collectives:
        return Collectives(-1, call, (), (), "")


class _NoDistributed:
    """The name ``dist`` on such a rank."""

    def __getattr__(self, name: str) -> NoReturn:
        raise AttributeError(WITHOUT_TORCH)


NO_DISTRIBUTED = _NoDistributed()
