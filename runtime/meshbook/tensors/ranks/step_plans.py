"""A recorded step as a rank does it without names and DTensors: calls on its own parts, which lie in numbered slots.

    slots    | what was there before | ──call──> what it makes | ──call──> ...

What an operation comes to is known of how its operands lie (`lowered_operations`), and in a step that repeats that
follows from how what was there before lies. So this is looked at, once, and all else is done as it was planned. An
operation that comes to no calls (it draws numbers, waits for other ranks, is given other numbers each time) is done as
always: its operands are given names, and its results lose theirs.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch.distributed.tensor import DTensor

from meshbook.tensors.messages.operations import TensorId, Use
from meshbook.tensors.ranks.lowered_operations import Slot, fill, tensors_in
from meshbook.tensors.ranks.rank_operations import RankTensor

if TYPE_CHECKING:
    from meshbook.torch_internals import DTensorSpec


class PlannedCall(NamedTuple):
    """An operation on tensors in slots."""

    operator: Callable[..., Any]
    args: Sequence[Any]
    places: Sequence[tuple[int, int]]
    """Which arguments are tensors, and in which slots."""
    nested: Sequence[tuple[int, Any]]
    """Which arguments are lists, where tensors may be in them."""
    kwargs: Mapping[str, Any]
    first: int
    """The slot of the first tensor that it makes."""
    makes: int

    @classmethod
    def of(
        cls, operator: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any], first: int, makes: int
    ) -> PlannedCall:
        """args, kwargs: with a `Slot` for each tensor."""
        places = [(at, value.at) for at, value in enumerate(args) if type(value) is Slot]
        nested = [(at, value) for at, value in enumerate(args) if type(value) in (list, tuple)]
        return cls(operator, args, places, nested, kwargs, first, makes)


def do_calls(calls: Sequence[PlannedCall], values: list[Any]) -> None:
    """Do what an operation of the step comes to."""
    for operator, args, places, nested, kwargs, first, makes in calls:
        given = [*args]
        for at, slot in places:
            given[at] = values[slot]
        for at, value in nested:
            given[at] = fill(value, values)
        made = operator(*given, **{name: fill(value, values) for name, value in kwargs.items()})
        if makes:
            values[first : first + makes] = (made,) if isinstance(made, torch.Tensor) else tensors_in(made)


class Held(NamedTuple):
    """A tensor at some time in the step, by its name there."""

    name: TensorId
    slot: int
    spec: DTensorSpec

    def named(self, values: Sequence[Any]) -> RankTensor:
        return RankTensor(DTensor(values[self.slot], self.spec, requires_grad=False))  # type: ignore[no-untyped-call]


class NamedUse(NamedTuple):
    """An operation that is done as always, on tensors that have names."""

    operands: Sequence[Held]
    """Those that the step has made."""
    results: Sequence[Held]
    changed: Sequence[tuple[TensorId, int]]
    """Operands that are in other memory afterwards, and their new slots."""
    released: Sequence[int] = ()
    """Slots of operands that nobody else needs."""


class PlannedUse(NamedTuple):
    """One operation of the step."""

    calls: Sequence[PlannedCall]
    named: NamedUse | None
    """If it does not come to calls."""
    replaced: Sequence[TensorId] = ()
    """What it makes anew that the last time has left behind."""
    unneeded: Sequence[int] = ()
    """Slots of what nobody needs after it."""


class Kept(NamedTuple):
    """A tensor that is there after the step, or after a part of it."""

    held: Held
    memory: int
    """Equal for those that share it; of what was there before, the place of the first."""
    family: int
    """Equal for views of one tensor; of what was there before, the place of the first."""
    made_by: int
    """The index of the operation after which it is as it will be."""


class Before(NamedTuple):
    """A tensor that was there before the step, and how it has to lie."""

    name: TensorId
    spec: DTensorSpec
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    memory: int
    """The place of the first that shares its memory."""


class StepPlan(NamedTuple):
    """What a recorded step comes to on a rank, for what was there before it as it lay when the plan was made."""

    before: list[Before]
    """In the first slots."""
    written: Sequence[int]
    """Which of those are written to, they or what shares their memory."""
    uses: Sequence[PlannedUse]
    kept: Sequence[Kept]
    slots: int

    def begin(self, tensors: Mapping[TensorId, Any]) -> StepRun | None:
        """Carry it out once more; None if what was there before lies in another way."""
        values: list[Any] = [None] * self.slots
        outer: list[Any] = [tensors.get(known.name) for known in self.before]
        firsts: dict[int, int] = {}
        for at, (held, (_, spec, shape, strides, memory)) in enumerate(zip(outer, self.before, strict=True)):
            if type(held) is not RankTensor or held.made is not None or held.sum is not None:
                return None
            local, now = held.tensor._local_tensor, held.tensor._spec
            if now is not spec:
                if now != spec:
                    return None
                self.before[at] = self.before[at]._replace(spec=now)  # the next time it takes no comparing
            if local.shape != shape or local.stride() != strides or firsts.setdefault(id(held.version), at) != memory:
                return None
            values[at] = local
        for at in self.written:
            outer[at].version[0] += 1
        return StepRun(self, values, outer)


class StepRun:
    """One time that a plan is carried out. After a failure it goes on with the operation that was cut off."""

    def __init__(self, plan: StepPlan, values: list[Any], outer: Sequence[RankTensor]) -> None:
        self._plan, self._values, self._outer = plan, values, outer
        self._named: dict[TensorId, RankTensor] = {}
        """What has a name for the operation that is being done, or was cut off: others may have done some of it."""

    def do(self, index: int, use: Use, do_named: Callable[[Use], None], tensors: dict[TensorId, Any]) -> None:
        """Do the operation with this index. do_named: does it on tensors that have names, and names its results."""
        planned = self._plan.uses[index]
        if planned.named is None:
            do_calls(planned.calls, self._values)
        else:
            self._name(planned.named, tensors)
            do_named(use)
            self._unname(planned.named, tensors)
        for name in planned.replaced:
            tensors.pop(name, None)
        for slot in planned.unneeded:
            self._values[slot] = None

    def _name(self, use: NamedUse, tensors: dict[TensorId, Any]) -> None:
        if not self._named:
            self._named = {held.name: held.named(self._values) for held in use.operands}
            for slot in use.released:
                self._values[slot] = None
        tensors.update(self._named)

    def _unname(self, use: NamedUse, tensors: dict[TensorId, Any]) -> None:
        for held in use.results:
            self._values[held.slot] = _as_planned(tensors.pop(held.name), held.spec)
        for name, slot in use.changed:
            self._values[slot] = tensors[name].tensor._local_tensor
        for name in self._named:
            del tensors[name]
        self._named = {}

    def keep(self, tensors: dict[TensorId, Any], done: int) -> None:
        """Give names to what is to be there afterwards, as operations before this one have left it."""
        versions = {at: held.version for at, held in enumerate(self._outer)}
        families = {at: held.family for at, held in enumerate(self._outer)}
        last = {kept.held.name: kept for kept in self._plan.kept if kept.made_by < done}
        for name, (held, memory, family, _) in last.items():
            tensors[name] = named = self._named.get(name) or held.named(self._values)
            named.version = versions.setdefault(memory, named.version)
            named.family = families.setdefault(family, named.family)


def _as_planned(made: RankTensor, spec: DTensorSpec) -> torch.Tensor:
    """This rank's part of a result, which may lie in another way since the operation was given other numbers."""
    tensor = made.tensor
    if tensor._spec != spec:
        tensor = tensor.redistribute(placements=spec.placements)
    return tensor._local_tensor
