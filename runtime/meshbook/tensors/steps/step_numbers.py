"""The parts of a recorded run, and the work that this process does each time it is repeated.

Optimizers count their steps, and uses are given numbers. An optimizer counts in one tensor without dims for each
parameter. Those of a step are put behind each other in memory, so that one operation counts in all of them, and one
reads them.
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple, TypeAlias

import torch

from meshbook.tensors.handles.distributed_mesh import Mesh
from meshbook.tensors.handles.mesh_tensor import new_seed
from meshbook.tensors.sending.op_failures import RepeatedStep
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
    key: tuple[Any, ...]
    """A key that is equal for runs that do the same; its first entry has a part for each use."""
    step: RepeatedStep
    here: Sequence[Here]
    held: Sequence[weakref.ref[Handle]]
    """The handles that must stay: of captured tensors and tensors left behind."""
    written: Sequence[weakref.ref[torch.Tensor]]
    """Captured tensors that it writes to."""
    kept: Sequence[object]
    """Objects that live as long as the recording does."""


aten = torch.ops.aten

_address, _item = torch.Tensor.data_ptr, torch.Tensor.item


class StepNumbers:
    """The numbers of one recorded step."""

    def __init__(self, here: Sequence[Here]) -> None:
        done = [each for each in here if isinstance(each, DoHere)]
        counted = {id(tensor): tensor for each in done if _counts(each) for tensor in each.written}
        self._counters = _Counters(list(counted.values()) if _can_be_joined(list(counted.values())) else [])
        written = {id(tensor): tensor for each in done for tensor in each.written}
        self._others = [tensor for name, tensor in written.items() if name not in self._counters.index]
        self._here = [self._prepared(each) for each in here]

    def _prepared(self, each: Here) -> float | DoHere | _Reading:
        """Return the work as it is done each time: a number is added to all counters."""
        if isinstance(each, ReadNumbers):
            return _Reading(each, self._counters)
        return float(each.args[1]) if _counts(each) and self._counters.are(each.written) else each

    def do(self, scalars: Sequence[torch.Tensor]) -> tuple[dict[int, Sequence[float]], Callable[[], None]]:
        """Do the work of the step here; return the numbers of uses, and a function that sets the counters back."""
        numbers: dict[int, Sequence[float]] = {}
        counted = self._counters.values() if self._counters.index else ()
        others = list(map(_item, self._others))
        for each in self._here:
            if isinstance(each, _Reading):
                numbers[each.use] = each.read(scalars)
            elif isinstance(each, DoHere):
                with torch.no_grad():
                    each.operator(*each.args, **each.kwargs)
            else:
                self._counters.array += each
        return numbers, functools.partial(self._undo, counted, others)

    def _undo(self, counted: Sequence[float], others: Sequence[float]) -> None:
        self._counters.array[:] = counted
        for tensor, value in zip(self._others, others, strict=True):
            tensor.fill_(value)


class _Counters:
    """Tensors without dims that are changed together, in memory that they have in common."""

    def __init__(self, tensors: Sequence[torch.Tensor]) -> None:
        self._tensors = tensors
        self.index = {id(tensor): at for at, tensor in enumerate(tensors)}
        self._join()

    def _join(self) -> None:
        memory = torch.stack([tensor.detach() for tensor in self._tensors]) if self._tensors else torch.empty(0)
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


def _counts(each: DoHere) -> bool:
    """Whether it adds one number to tensors without dims, as optimizers count their steps."""
    return each.operator is aten._foreach_add_.Scalar and len(each.args) == 2 and not each.kwargs


def _can_be_joined(tensors: Sequence[torch.Tensor]) -> bool:
    return all(
        type(tensor) is torch.Tensor
        and not (tensor.dim() or tensor.requires_grad or tensor.is_inference() or tensor._is_view())
        and tensor.device.type == "cpu"
        and tensor.dtype is tensors[0].dtype
        for tensor in tensors
    )


class _Reading:
    """The numbers of a use, as they are each time."""

    def __init__(self, numbers: ReadNumbers, counters: _Counters) -> None:
        self.use = numbers.use
        self._counters = counters
        self._numbers: list[float] = []
        self._counted: list[tuple[int, int]] = []
        self._others: list[tuple[int, torch.Tensor | Given | Seed]] = []
        for at, source in enumerate(numbers.sources):
            if isinstance(source, float | int):
                self._numbers.append(source)
                continue
            self._numbers.append(0.0)
            if id(source) in counters.index:
                self._counted.append((at, counters.index[id(source)]))
            else:
                self._others.append((at, source))

    def read(self, scalars: Sequence[torch.Tensor]) -> list[float]:
        found = list(self._numbers)
        if self._counted:
            now = self._counters.array.tolist()
            for at, index in self._counted:
                found[at] = now[index]
        for at, source in self._others:
            if isinstance(source, Seed):
                found[at] = float(new_seed())
            else:
                found[at] = (scalars[source.at] if isinstance(source, Given) else source).item()
        return found
