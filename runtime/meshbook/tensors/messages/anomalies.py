"""The hunt for the operation that made a NaN of values that were none.

While it is on, each rank looks at its parts of all operands and results. At the end of a batch all ranks put together
their finds, so that all know the same first operation; it is told as soon as a value is waited for.
"""

from __future__ import annotations

import contextlib
import warnings
import weakref
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from meshbook.errors import HostLost, MeshStoppedError, WorkerLost
from meshbook.formatting import name_ranks

NAN, NOT_FINITE = "nan", "not finite"


class Searched(Protocol):
    """A stream of operations that can be searched."""

    @property
    def is_cut_off(self) -> bool:
        """Whether ranks ended, or were interrupted, before they could report on some operations."""

    def settle(self) -> None: ...

    def forget_find(self) -> None:
        """Forget the find of a hunt, and what it could not see."""


CUT_OFF = (
    "a rank ended, or was interrupted, within detect_anomaly: nobody knows whether what was on its way then made a "
    "NaN, so do that again within it"
)

FOUND = 0
"""The number, of no tensor, under which ranks report a find among the failures."""


class Hunt:
    """The hunt of this process over all its streams."""

    def __init__(self) -> None:
        self.kind = ""
        """The kind of value that batches are searched for now."""
        self.streams: weakref.WeakSet[Searched] = weakref.WeakSet()

    @contextlib.contextmanager
    def begin(self, kind: str) -> Iterator[None]:
        """Search for a kind of value in the block. Raises: the find of this hunt, or of the one around it."""
        before = self.kind
        self._settle()
        self._forget()
        self.kind = kind
        try:
            yield
            self._settle()
            if any(stream.is_cut_off for stream in list(self.streams)):
                warnings.warn(CUT_OFF, stacklevel=5)
        finally:
            self.kind = before
            self._forget()

    def _forget(self) -> None:
        for stream in list(self.streams):
            stream.forget_find()

    def _settle(self) -> None:
        """Wait for all streams, but not for meshes that are gone. Raises: the find of a hunt."""
        for stream in list(self.streams):
            with contextlib.suppress(MeshStoppedError, WorkerLost, HostLost):
                stream.settle()


hunt = Hunt()


@contextlib.contextmanager
def detect_anomaly(*, infinities: bool = False) -> Iterator[None]:
    """Make it an error, in a block, that an operation on mesh tensors makes a NaN of values without one.

    The error names the operation, the line that asked for it (of one for gradients: the line of ``backward``) and the
    ranks. It is raised where a value is next waited for, at the end of the block at the latest. infinities: they count
    as well. The tensors stay as they are. Each operation costs a look at its operands and results. Where a rank ended
    before it could report, a warning says so at the end. Raises: TensorError.
    """
    with hunt.begin(NOT_FINITE if infinities else NAN):
        yield


class Search:
    """The finds of one rank in the operations of a batch."""

    def __init__(self, what: str, mesh: DeviceMesh, operations: int) -> None:
        self._what, self._mesh = what, mesh
        self._me = int((mesh.mesh.flatten() == dist.get_rank()).nonzero())
        self._seen = torch.zeros(operations, 1 + mesh.size(), dtype=torch.int32, device="cpu")
        """A row for each operation: whether an operand had one; and for each rank, whether a result has one."""

    def note_operands(self, index: int, tensors: Iterable[Any]) -> None:
        self._seen[index, 0] = any(map(self._has_one, tensors))

    def note_results(self, index: int, tensors: Iterable[Any]) -> None:
        self._seen[index, 1 + self._me] = any(map(self._has_one, tensors))

    def _has_one(self, tensor: Any) -> bool:
        local = tensor.to_local()
        if not (local.is_floating_point() or local.is_complex()):
            return False
        found = local.isnan() if self._what == NAN else ~local.isfinite()
        return bool(found.any())

    def tell(self, failed: dict[int, str], first: int, is_step: bool) -> None:
        """Put the first operation that made one, and on which ranks, under `FOUND`; a collective.

        first: the number of the first operation; is_step: all are parts of that one.
        """
        seen = self._seen.to(self._mesh.device_type)
        for axis in range(self._mesh.ndim):
            dist.all_reduce(seen, dist.ReduceOp.MAX, group=self._mesh.get_group(axis))
        guilty = ((seen[:, 0] == 0) & seen[:, 1:].any(1)).nonzero().flatten().tolist()
        if not guilty:
            return
        ranks: Sequence[int] = self._mesh.mesh.flatten()[seen[guilty[0], 1:].bool().cpu()].tolist()
        kind = "a NaN" if self._what == NAN else "a value that is not finite"
        at = (first, guilty[0]) if is_step else (first + guilty[0], 0)
        failed[FOUND] = (
            f"{at[0]} {at[1]} {kind} is on {name_ranks(ranks)} in what it made, and none in what it was made of"
        )
