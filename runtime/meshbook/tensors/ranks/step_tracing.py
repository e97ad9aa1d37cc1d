"""How the plan of a recorded step is found: by looking at each operation of one repetition that is done as always."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch.distributed.tensor import DTensor

from meshbook.tensors.messages.operations import WAIT, Recording, TensorId, Use
from meshbook.tensors.ranks.lowered_operations import Lowered, Slot
from meshbook.tensors.ranks.partial_sums import is_shared
from meshbook.tensors.ranks.rank_operations import RankTensor
from meshbook.tensors.ranks.step_plans import Before, Held, Kept, NamedUse, PlannedCall, PlannedUse, StepPlan
from meshbook.torch_internals import tree_leaves

_SAME = (torch.ops.aten.alias.default, torch.ops.aten.detach.default)
"""What they give is what they are given, where autograd looks at neither."""


class Untraceable(Exception):
    """A step for which there is no plan: what it comes to depends on more than how its tensors lie."""


class StepTrace:
    """One repetition, looked at. Between operations no tensor lives on because of it: who shares a sum is counted."""

    def __init__(self, recording: Recording, uses: Sequence[Use], tensors: Mapping[TensorId, Any]) -> None:
        """tensors: by their names, as they are at any time. Raises: Untraceable."""
        self._tensors = tensors
        self._made = {name for use in uses for name in use.results}
        self._kept_names = {*recording.results, *(name for name in self._made if name >= 0)}
        self._identities: list[object] = []
        """Held, so that nothing else is taken for one of them."""
        self._places: dict[int, int] = {}
        """Of memories and of families, by their identities."""
        self._held: dict[TensorId, Held] = {}
        self._memories: dict[TensorId, int] = {}
        self._roots: dict[TensorId, int] = {}
        """In which memory a view's base is."""
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
        """An operation is about to be done. Raises: Untraceable."""
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
        """It was done. lowered: what it came to. varies: it is given other numbers each time. Raises: Untraceable."""
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
        calls: list[PlannedCall] = []
        for operator, args, kwargs, makes in lowered.calls:
            given = _in_slots(args, slots)
            if operator in _SAME:
                slots.append(given[0].at)
                continue
            first = self._new_slots(makes)
            named = {name: _in_slots(value, slots) for name, value in kwargs.items()}
            calls.append(PlannedCall.of(operator, given, named, first, makes))
            slots += range(first, first + makes)
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
        """The first of so many."""
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
        """The step is over."""
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
    """An argument of a call with the step's slots for those of its operation."""
    if type(value) is Slot:
        return Slot(slots[value.at])
    return [_in_slots(each, slots) for each in value] if type(value) in (list, tuple) else value


def _slots_of(use: PlannedUse) -> Iterator[int]:
    """What an operation reads and makes."""
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
    """unneeded: slots of what nobody needs after it."""
    if use.named is None:
        return use._replace(unneeded=list(unneeded))
    released = [held.slot for held in use.named.operands if held.slot in unneeded]
    return use._replace(
        named=use.named._replace(released=released), unneeded=[slot for slot in unneeded if slot not in released]
    )
