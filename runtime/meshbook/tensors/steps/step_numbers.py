"""The parts of a recorded run, and the work that this process does each time it is repeated.

Optimizers count their steps, and uses are given numbers. An optimizer counts in one tensor without dims for each
parameter. Those of a step are put behind each other in memory, so that one operation counts in all of them, and one
reads them.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple, TypeAlias

import torch

from meshbook.tensors.handles.distributed_mesh import Mesh
from meshbook.tensors.handles.mesh_tensor import new_seed
from meshbook.tensors.messages.issued_lines import CodeLine
from meshbook.tensors.messages.operations import Recording, TensorId
from meshbook.tensors.sending.op_settling import Handle


class Seed(NamedTuple):
    """A number that is drawn."""


class Given(NamedTuple):
    """The number of an argument that is a tensor without dims, by its place among these."""

    at: int


NumberSource: TypeAlias = float | torch.Tensor | Seed | Given


class ReadNumbers(NamedTuple):
    """The numbers of a use: constants, tensors of this process that have them, seeds to draw."""

    use: int
    """The index of the use."""
    sources: Sequence[NumberSource]


class DoHere(NamedTuple):
    """An operation that writes to tensors of this process."""

    operator: Callable[..., Any]
    args: Sequence[Any]
    kwargs: Mapping[str, Any]
    written: Sequence[torch.Tensor]


Here: TypeAlias = ReadNumbers | DoHere
"""A piece of work of this process, in order, each time."""


class Recorded(NamedTuple):
    """A run that can be repeated."""

    mesh: Mesh
    key: object
    """A key that is equal for runs that do the same."""
    lines: Sequence[tuple[str, CodeLine, object]]
    """The operator, the line, and the part of the key of each use."""
    recording: Recording
    issued: Sequence[tuple[Any, ...]]
    here: Sequence[Here]
    captured: Sequence[TensorId]
    left: Sequence[TensorId]
    held: Sequence[weakref.ref[Handle]]
    """The handles that must stay: of captured tensors and tensors left behind."""
    written: Sequence[weakref.ref[torch.Tensor]]
    """Captured tensors that it writes to."""
    kept: Sequence[object]
    """Objects that live as long as the recording does."""


aten = torch.ops.aten

_address = torch.Tensor.data_ptr


Counted: TypeAlias = tuple[Sequence[float], Sequence[float]]
"""The former values of tensors that a step writes to in this process: counters, and others."""


class StepNumbers:
    """The numbers of one recorded step."""

    def __init__(self, here: Sequence[Here]) -> None:
        written = {id(tensor): tensor for each in here if isinstance(each, DoHere) for tensor in each.written}
        counted = {
            id(tensor): tensor for each in here if isinstance(each, DoHere) and _counts(each) for tensor in each.written
        }
        self._counters = _Counters(list(counted.values())) if _can_be_joined(list(counted.values())) else None
        self._others = [tensor for name, tensor in written.items() if self._counters is None or name not in counted]
        self._here = [self._prepared(each) for each in here]

    def _prepared(self, each: Here) -> float | DoHere | _Reading:
        """Return the work as it is done each time: a number is added to all counters."""
        if isinstance(each, ReadNumbers):
            return _Reading(each, self._counters)
        if self._counters is not None and _counts(each) and self._counters.are(each.written):
            return float(each.args[1])
        return each

    def do(self, scalars: Sequence[torch.Tensor]) -> tuple[dict[int, Sequence[float]], Counted]:
        """Do the work of the step here; return the numbers of uses, and the former values for `undo`."""
        numbers: dict[int, Sequence[float]] = {}
        counted = self._counters.values() if self._counters is not None else ()
        before = counted, _values(self._others) if self._others else ()
        for each in self._here:
            if isinstance(each, _Reading):
                numbers[each.use] = each.read(scalars)
            elif isinstance(each, DoHere):
                with torch.no_grad():
                    each.operator(*each.args, **each.kwargs)
            elif self._counters is not None:
                self._counters.array += each
        return numbers, before

    def undo(self, before: Counted) -> None:
        """Set the counters back to their former values."""
        counted, others = before
        if self._counters is not None:
            self._counters.set(counted)
        for tensor, value in zip(self._others, others, strict=True):
            tensor.fill_(value)


class _Counters:
    """Tensors without dims that are changed together, in memory that they have in common."""

    def __init__(self, tensors: Sequence[torch.Tensor]) -> None:
        self._tensors = tensors
        self.index = {id(tensor): at for at, tensor in enumerate(tensors)}
        self._join()

    def _join(self) -> None:
        memory = torch.stack([tensor.detach() for tensor in self._tensors])
        for tensor, place in zip(self._tensors, memory.unbind(), strict=True):
            tensor.data = place
        self.array = memory.numpy()
        """The common memory: NumPy counts in it in a fraction of the time of an operation of torch."""
        self._addresses = list(map(_address, self._tensors))

    def are(self, tensors: Sequence[torch.Tensor]) -> bool:
        """Whether these are all of the tensors."""
        return len(tensors) == len(self._tensors) and all(id(tensor) in self.index for tensor in tensors)

    def values(self) -> list[float]:
        """Return the present values, also of tensors that were replaced since."""
        if list(map(_address, self._tensors)) != self._addresses:
            self._join()
        return list(self.array.tolist())

    def set(self, values: Sequence[float]) -> None:
        self.array[:] = values


def _counts(each: DoHere) -> bool:
    """Whether it adds one number to tensors without dims, as optimizers count their steps."""
    return each.operator is aten._foreach_add_.Scalar and len(each.args) == 2 and not each.kwargs


def _can_be_joined(tensors: Sequence[torch.Tensor]) -> bool:
    return len(tensors) > 1 and all(
        type(tensor) is torch.Tensor
        and not (tensor.dim() or tensor.requires_grad or tensor.is_inference() or tensor._is_view())
        and tensor.device.type == "cpu"
        and tensor.dtype is tensors[0].dtype
        for tensor in tensors
    )


class _Reading:
    """The numbers of a use, as they are each time."""

    def __init__(self, numbers: ReadNumbers, counters: _Counters | None) -> None:
        self.use = numbers.use
        self._numbers = [0.0 if isinstance(each, torch.Tensor | Given | Seed) else each for each in numbers.sources]
        known = counters.index if counters is not None else {}
        tensors = [(at, each) for at, each in enumerate(numbers.sources) if isinstance(each, torch.Tensor)]
        self._counters = counters
        self._counted = [(at, known[id(each)]) for at, each in tensors if id(each) in known]
        others = [(at, each) for at, each in tensors if id(each) not in known]
        self._places, self._tensors = [at for at, _ in others], [each for _, each in others]
        self._others = [(at, each) for at, each in enumerate(numbers.sources) if isinstance(each, Given | Seed)]

    def read(self, scalars: Sequence[torch.Tensor]) -> list[float]:
        found = list(self._numbers)
        if self._counted and self._counters is not None:
            now = self._counters.array.tolist()
            for at, index in self._counted:
                found[at] = now[index]
        if self._places:
            for at, number in zip(self._places, _values(self._tensors), strict=True):
                found[at] = number
        for at, source in self._others:
            found[at] = scalars[source.at].item() if isinstance(source, Given) else float(new_seed())
        return found


def _values(tensors: Sequence[torch.Tensor]) -> list[float]:
    """Return the numbers of tensors without dims; many of one kind are read at once."""
    if len(tensors) > 2 and len({tensor.dtype for tensor in tensors}) == 1:
        return torch.stack(list(tensors)).tolist()
    return [tensor.item() for tensor in tensors]
