"""A recorded step as a rank does it without names and DTensors: calls on its own parts, which lie in numbered slots.

    slots    | tensors from before the step | ──call──> results | ──call──> ...

The calls that an operation becomes are known for each layout of its operands (`lowered_operations`), and in a step that
repeats all layouts follow from those of the tensors from before. So these layouts are compared, once, and all else is
done as planned. An operation without such calls (it draws numbers, waits for other ranks, is given other numbers each
time) is done as always: its operands are given names, and its results lose theirs. `StepTrace` makes a plan of a run.
"""

from __future__ import annotations

import contextlib
import math
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Concatenate, NamedTuple

import torch
from torch.distributed.tensor import DTensor
from typing_extensions import ParamSpec

from meshbook.tensors.messages.issued_lines import each_line
from meshbook.tensors.messages.operations import WAIT, Recording, TensorId, Use
from meshbook.tensors.ranks.lowered_operations import LocalCall, Lowered, Slot, do_calls
from meshbook.tensors.ranks.rank_operations import RankTensor, is_shared
from meshbook.torch_internals import tree_leaves

if TYPE_CHECKING:
    from meshbook.torch_internals import DTensorSpec


P = ParamSpec("P")

TRACED_FROM = 3
"""The times that a step is done as always before there is a plan: by then the calls of its operations are known."""
TRACED_AT_MOST = 10
"""The most plans of one step; tensors that lie in another way each time need no more."""


class Held(NamedTuple):
    """A tensor at one moment of the step, by its name in the step."""

    name: TensorId
    slot: int
    spec: DTensorSpec

    def named(self, values: Sequence[Any]) -> RankTensor:
        return RankTensor(DTensor(values[self.slot], self.spec, requires_grad=False))  # type: ignore[no-untyped-call]


class NamedUse(NamedTuple):
    """An operation that is done as always, on tensors that have names."""

    operands: Sequence[Held]
    """The operands that the step has made."""
    results: Sequence[Held]
    changed: Sequence[tuple[TensorId, int]]
    """Operands that are in other memory afterwards, and their new slots."""
    released: Sequence[int] = ()
    """The slots of operands that nothing else needs."""


class PlannedUse(NamedTuple):
    """An operation of the step."""

    calls: Sequence[LocalCall]
    named: NamedUse | None
    """The operation by names, where it does not become calls."""
    replaced: Sequence[TensorId] = ()
    """The results that replace tensors that the last time has left behind."""
    unneeded: Sequence[int] = ()
    """The slots that nothing needs after the operation."""


class Kept(NamedTuple):
    """A tensor that is there after the step, or after a part of it."""

    held: Held
    memory: int
    """A number that tensors in one memory share: the place of the first that was there before the step."""
    family: int
    """A number that views of one tensor share: the place of the first that was there before the step."""
    made_by: int
    """The index of the operation after which the tensor has its final layout."""


class Before(NamedTuple):
    """A tensor from before the step, and the layout that it has to have."""

    name: TensorId
    spec: DTensorSpec
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    memory: int
    """The place of the first tensor in its memory."""


class StepPlan(NamedTuple):
    """A recorded step as calls on this rank, for tensors from before that lie as they did when the plan was made."""

    before: list[Before]
    """The tensors from before the step, which are in the first slots."""
    written: Sequence[int]
    """The places of tensors that the step writes to, or to the memory of which it writes."""
    uses: Sequence[PlannedUse]
    kept: Sequence[Kept]
    slots: int

    def begin(self, tensors: Mapping[TensorId, Any]) -> StepRun | None:
        """Begin another run; None if tensors from before the step lie in another way."""
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
    """A run of a plan. After a failure it goes on with the operation that was cut off."""

    def __init__(self, plan: StepPlan, values: list[Any], outer: Sequence[RankTensor]) -> None:
        self._plan, self._values, self._outer = plan, values, outer
        self._named: dict[TensorId, RankTensor] = {}
        """The tensors with names for the operation that is under way or was cut off, of which some may be done."""
        self._left: dict[TensorId, RankTensor] = {}
        """The tensors that had names and are left behind: to make a DTensor takes as long as a small operation."""

    def do(self, index: int, use: Use, do_named: Callable[[Use], None], tensors: dict[TensorId, Any]) -> None:
        """Do the operation with this index. do_named: does it on tensors with names, and names its results."""
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
            self._named = {held.name: self._with_name(held) for held in use.operands}
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

    def _with_name(self, held: Held) -> RankTensor:
        known = self._left.get(held.name)
        if known is None or known.tensor._local_tensor is not self._values[held.slot]:
            known = held.named(self._values)
            if held.name >= 0:
                self._left[held.name] = known
        return known

    def keep(self, tensors: dict[TensorId, Any], done: int) -> None:
        """Give names to the tensors that are there afterwards, as operations before this one have left them."""
        versions = {at: held.version for at, held in enumerate(self._outer)}
        families = {at: held.family for at, held in enumerate(self._outer)}
        last = {kept.held.name: kept for kept in self._plan.kept if kept.made_by < done}
        for name, (held, memory, family, _) in last.items():
            tensors[name] = named = self._named.get(name) or self._with_name(held)
            named.version = versions.setdefault(memory, named.version)
            named.family = families.setdefault(family, named.family)


def _as_planned(made: RankTensor, spec: DTensorSpec) -> torch.Tensor:
    """Return this rank's part of a result, laid out as planned: other numbers may have changed its layout."""
    tensor = made.tensor
    if tensor._spec != spec:
        tensor = tensor.redistribute(placements=spec.placements)
    return tensor._local_tensor


_SAME = (torch.ops.aten.alias.default, torch.ops.aten.detach.default)
"""Operators whose result is their argument, where autograd looks at neither."""


class Untraceable(Exception):
    """Raised for a step without a plan: its calls depend on more than the layouts of its tensors."""


class StepTrace:
    """A record of one repetition. Between operations it keeps no tensor alive: holders of sums are counted."""

    def __init__(self, recording: Recording, uses: Sequence[Use], tensors: Mapping[TensorId, Any]) -> None:
        """tensors: all tensors by their names, as they change. Raises: Untraceable."""
        self._tensors = tensors
        self._made = {name for use in uses for name in use.results}
        self._kept_names = {*recording.results, *(name for name in self._made if name >= 0)}
        self._identities: list[object] = []
        """The objects whose identities are used, kept so that no other object gets one of these."""
        self._places: dict[int, int] = {}
        """The places of memories and of families, by their identities."""
        self._held: dict[TensorId, Held] = {}
        self._memories: dict[TensorId, int] = {}
        self._roots: dict[TensorId, int] = {}
        """The memory of each view's base."""
        self._stale: set[TensorId] = set()
        self._written: set[int] = set()
        self._slots = 0
        self._uses: list[PlannedUse] = []
        self._kept: list[Kept] = []
        self._before: list[Before] = []
        for name in dict.fromkeys(name for use in uses for name in use.tensors if name not in self._made):
            held, slot = self._find(name), self._new_slots(1)
            if held.made is not None or held.sum is not None:
                raise Untraceable
            local = held.tensor._local_tensor
            self._know(name, held, slot)
            about = held.tensor._spec, tuple(local.shape), local.stride(), self._memories[name]
            self._before.append(Before(name, *about))

    def begin(self, use: Use) -> None:
        """Note that an operation is about to be done. Raises: Untraceable."""
        operands = {name: self._find(name) for name in use.tensors}
        if not self._stale.isdisjoint(operands):
            raise Untraceable  # a view that is made again
        self._then = {
            name: (held.tensor._local_tensor, held.tensor._spec, held.version[0]) for name, held in operands.items()
        }
        self._together = {name for name, held in operands.items() if is_shared(held)}
        if use.template == WAIT:
            families = Counter(id(each.family) for each in self._tensors.values() if isinstance(each, RankTensor))
            self._together.update(name for name, held in operands.items() if families[id(held.family)] > 1)

    def end(self, use: Use, operator: str, lowered: Lowered | None, *, varies: bool) -> None:
        """Note that it was done. lowered: its calls. varies: its numbers are others each time. Raises: Untraceable."""
        changed = []
        for name, (local, spec, version) in self._then.items():
            held = self._find(name)
            if held.version[0] != version:
                self._note_written(name, held)
            if held.tensor._local_tensor is not local or held.tensor._spec is not spec:
                changed.append(name)
        if not self._together.isdisjoint(changed):
            raise Untraceable  # others lie in another way now, too
        self._then = {}
        is_checked = operator == "aten.embedding.default"  # whether there are such rows
        if lowered is None or use.template == WAIT or varies or changed or is_checked:
            self._uses.append(self._named(use, changed))
        else:
            self._uses.append(self._planned(use, lowered))

    def _note_written(self, name: TensorId, held: RankTensor) -> None:
        if held.made is not None:
            raise Untraceable  # it is written to its base
        self._written.add(self._memories[name])
        self._stale.update(other for other, root in self._roots.items() if root == self._memories[name])

    def _planned(self, use: Use, lowered: Lowered) -> PlannedUse:
        slots = [self._held[name].slot for name in use.tensors]
        calls: list[LocalCall] = []
        for call in lowered.calls:
            given = _in_slots(call.args, slots)
            if call.operator in _SAME:
                slots.append(given[0].at)
                continue
            first = self._new_slots(call.makes)
            named = {name: _in_slots(value, slots) for name, value in call.kwargs.items()}
            calls.append(LocalCall.of(call.operator, given, named, first, call.makes))
            slots += range(first, first + call.makes)
        for name, result in zip(use.results, [each for each in lowered.results if each is not None], strict=False):
            self._know(name, self._find(name), slots[result.slot])
        return PlannedUse(calls, None, [name for name in use.results if name >= 0])

    def _named(self, use: Use, changed: Sequence[TensorId]) -> PlannedUse:
        operands = [self._held[name] for name in dict.fromkeys(use.tensors) if name in self._made]
        now: list[tuple[TensorId, int]] = []
        for name in changed:
            self._know(name, self._find(name), self._new_slots(1))
            now.append((name, self._held[name].slot))
        for name in use.results:
            self._know(name, self._find(name), self._new_slots(1))
        return PlannedUse(
            [],
            NamedUse(operands, [self._held[name] for name in use.results], now),
            [name for name in use.results if name >= 0],
        )

    def _find(self, name: TensorId) -> RankTensor:
        held = self._tensors.get(name)
        if type(held) is not RankTensor or type(held.tensor) is not DTensor:
            raise Untraceable
        return held

    def _new_slots(self, count: int) -> int:
        """Return the first of so many new slots."""
        self._slots += count
        return self._slots - count

    def _know(self, name: TensorId, held: RankTensor, slot: int) -> None:
        self._held[name] = now = Held(name, slot, held.tensor._spec)
        self._memories[name] = self._place(held.version, slot)
        if held.made is not None:
            if name in self._kept_names:
                raise Untraceable
            self._roots[name] = self._place(held.root.version, slot)
        if name in self._kept_names:
            family = self._place(held.family, slot)
            self._kept.append(Kept(now, self._memories[name], family, len(self._uses)))

    def _place(self, identity: object, slot: int) -> int:
        if id(identity) not in self._places:
            self._identities.append(identity)
        return self._places.setdefault(id(identity), slot)

    def finish(self) -> StepPlan:
        """Return the plan, at the end of the step."""
        outer = len(self._before)
        last = {kept.held.name: kept.held.slot for kept in self._kept}
        needed: dict[int, float] = {}
        for index, use in enumerate(self._uses):
            needed.update(dict.fromkeys(_slots_of(use), float(index)))
        needed.update(dict.fromkeys(last.values(), math.inf))
        ends: dict[float, list[int]] = {}
        for slot, end in needed.items():
            if slot >= outer:
                ends.setdefault(end, []).append(slot)
        uses = [_with_ends(use, ends.get(index, ())) for index, use in enumerate(self._uses)]
        written = [at for at, each in enumerate(self._before) if each.memory in self._written]
        return StepPlan(self._before, written, uses, self._kept, self._slots)


def _in_slots(value: Any, slots: Sequence[int]) -> Any:
    """Return an argument of a call with the step's slots for those of its operation."""
    if type(value) is Slot:
        return Slot(slots[value.at])
    return [_in_slots(each, slots) for each in value] if type(value) in (list, tuple) else value


def _slots_of(use: PlannedUse) -> Iterator[int]:
    """Yield the slots that an operation reads and makes."""
    for call in use.calls:
        for value in tree_leaves((call.args, call.kwargs), is_leaf=_is_slot):
            if _is_slot(value):
                yield value.at
        yield from range(call.first, call.first + call.makes)
    if use.named is not None:
        yield from (held.slot for held in (*use.named.operands, *use.named.results))
        yield from (slot for _, slot in use.named.changed)


def _is_slot(value: object) -> bool:
    return type(value) is Slot


def _with_ends(use: PlannedUse, unneeded: Collection[int]) -> PlannedUse:
    """Return the operation with the slots that nothing needs after it."""
    if use.named is None:
        return use._replace(unneeded=list(unneeded))
    released = [held.slot for held in use.named.operands if held.slot in unneeded]
    return use._replace(
        named=use.named._replace(released=released), unneeded=[slot for slot in unneeded if slot not in released]
    )


class KnownStep:
    """A recorded step as this rank does it each time."""

    def __init__(self, recording: Recording) -> None:
        self.recording = recording
        self.uses = list(map(Use._make, recording.uses))
        self.lines = list(each_line(recording.lines, len(self.uses)))
        self._plan: StepPlan | None = None
        self._trace: StepTrace | None = None
        self._times = self._traced = 0

    def begin(self, tensors: Mapping[TensorId, Any]) -> StepRun | None:
        """Begin the planned run; returns None without a plan, or where tensors have other layouts."""
        run = self._plan.begin(tensors) if self._plan is not None else None
        self._trace = None
        if run is None:
            self._plan, self._times = None, self._times + 1
            if self._times >= TRACED_FROM and self._traced < TRACED_AT_MOST:
                self._traced += 1
                with contextlib.suppress(Untraceable):
                    self._trace = StepTrace(self.recording, self.uses, tensors)
        return run

    def trace(self, note: Callable[Concatenate[StepTrace, P], None], *args: P.args, **kwargs: P.kwargs) -> None:
        """Note something in the trace of this run, if it is traced, and trace it no more if no plan can be made."""
        if self._trace is not None:
            try:
                note(self._trace, *args, **kwargs)
            except Untraceable:
                self._trace = None

    def finish(self) -> None:
        """Note that the step was done as always, to its end."""
        if self._trace is not None:
            self._plan, self._trace = self._trace.finish(), None

    def forget(self, *, plan: bool) -> None:
        """Forget the run that was cut off. plan: also the plan, since groups are others."""
        self._trace = None
        if plan:
            self._plan, self._times = None, 0
