"""An operation on DTensors as this rank does it: operations on its own parts, and collectives.

DTensor works these out each time, in about 100 us of Python. For operands that lie in the same way they are the same,
so they are noted at the second time, and done from the third on without DTensor.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard

from meshbook.torch_internals import FakeTensor, Operator, TorchDispatchMode, tree_leaves, tree_map

if TYPE_CHECKING:
    from meshbook.torch_internals import DTensorSpec

MOST_WAYS = 4096
"""The most operations that are known at a time."""
_UNDERSTOOD = ("aten::", "_c10d_functional::")
aten = torch.ops.aten
_READS_VALUES = (aten._local_scalar_dense.default,)


class Slot(NamedTuple):
    """The place of a tensor of this rank: a part of an operand, or a result of an earlier call."""

    at: int


class LocalCall(NamedTuple):
    """A call on tensors in slots."""

    operator: Operator
    args: Sequence[Any]
    places: Sequence[tuple[int, int]]
    """The indices of the arguments that are tensors, with their slots."""
    nested: Sequence[tuple[int, Any]]
    """The indices of the arguments that are lists, in which tensors may be."""
    kwargs: Mapping[str, Any]
    first: int
    """The slot of the first tensor that it makes."""
    makes: int
    """The number of tensors that it makes."""

    @classmethod
    def of(
        cls, operator: Operator, args: Sequence[Any], kwargs: Mapping[str, Any], first: int, makes: int
    ) -> LocalCall:
        """Prepare a call. args, kwargs: with a `Slot` for each tensor."""
        places = [(at, value.at) for at, value in enumerate(args) if type(value) is Slot]
        nested = [(at, value) for at, value in enumerate(args) if type(value) in (list, tuple)]
        return cls(operator, args, places, nested, kwargs, first, makes)


def do_calls(calls: Sequence[LocalCall], values: list[Any]) -> None:
    """Do calls one after the other. values: the tensors in the slots, to which those that are made are added."""
    for operator, args, places, nested, kwargs, first, makes in calls:
        given = [*args]
        for at, slot in places:
            given[at] = values[slot]
        for at, value in nested:
            given[at] = _fill(value, values)
        made = operator(*given, **{name: _fill(value, values) for name, value in kwargs.items()})
        if makes:
            values[first : first + makes] = (made,) if isinstance(made, torch.Tensor) else _tensors_in(made)


class _Result(NamedTuple):
    """A result of an operation. spec: None if the result is an operand itself."""

    slot: int
    spec: DTensorSpec | None


class Lowered(NamedTuple):
    """The calls that do an operation on operands with one layout."""

    calls: Sequence[LocalCall]
    results: Sequence[_Result | None]
    is_list: bool

    def do(self, operands: Sequence[DTensor]) -> Any:
        """Do the operation, and return its results."""
        values: list[torch.Tensor] = [operand._local_tensor for operand in operands]
        do_calls(self.calls, values)
        results = [
            None if each is None
            else operands[each.slot] if each.spec is None
            else DTensor(values[each.slot], each.spec, requires_grad=False)  # type: ignore[no-untyped-call]
            for each in self.results
        ]  # fmt: skip
        return results if self.is_list else results[0] if results else None


def way_of(operator: Hashable, tensors: Sequence[Any], numbers: Sequence[float]) -> Hashable:
    """Return a key for the calls that an operation becomes; equal keys mean the same calls."""
    lie = [(tensor._spec, tensor._local_tensor.shape, tensor._local_tensor.stride()) for tensor in tensors]
    return (operator, repr(numbers) if numbers else "", *lie)


class LoweredOperations:
    """The operations of one device mesh whose calls are known."""

    def __init__(self) -> None:
        self._known: dict[Hashable, Lowered | None] = {}

    def find(self, way: Hashable) -> Lowered | None:
        known = self._known.get(way)
        return None if known is _SEEN else known

    def do(self, way: Hashable, operands: Sequence[Any], operation: Callable[[], Any]) -> Any:
        """Do an operation whose calls are not known; they are noted the second time."""
        if way not in self._known:
            if len(self._known) >= MOST_WAYS:
                self._known.clear()
            self._known[way] = _SEEN
            return operation()
        if self._known[way] is not _SEEN or _share_memory(operands):
            return operation()
        self._known[way] = None
        before = [(operand._local_tensor, operand._spec) for operand in operands]
        with (noted := _Calls([local for local, _ in before])):
            made = operation()
        after = [(operand._local_tensor, operand._spec) for operand in operands]
        same = all(now[0] is then[0] and now[1] is then[1] for now, then in zip(after, before, strict=True))
        if same and all(_is_plain(spec) for _, spec in before):
            self._known[way] = noted.lowered(operands, made)
        return made


_SEEN = Lowered((), (), is_list=False)


class _Calls(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """A mode that notes the calls on tensors of this rank."""

    def __init__(self, locals_: Sequence[torch.Tensor]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._calls: list[LocalCall] = []
        self._slots: dict[Hashable, int] = {}
        self._kept: list[torch.Tensor] = []
        """The tensors of the calls, kept so that no memory is used twice meanwhile."""
        self._is_understood = all(type(each) is torch.Tensor and not each.is_complex() for each in locals_)
        self._add(locals_)

    def __torch_dispatch__(
        self, func: Operator, types: Sequence[type], args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if FakeTensor in types:
            return func(*args, **kwargs)  # DTensor finds out shapes: no values are made
        if any(kind is not torch.Tensor for kind in types):
            return NotImplemented  # it comes here again, as what it comes to
        if not func._schema.name.startswith(_UNDERSTOOD) or func in _READS_VALUES:
            self._is_understood = False
        given, named = tree_map(self._slot_of, (list(args), dict(kwargs)))
        made = func(*args, **kwargs)
        tensors = _tensors_in(made)
        self._calls.append(LocalCall.of(func, given, named, len(self._kept), len(tensors)))
        self._add(tensors)
        return made

    def lowered(self, operands: Sequence[Any], made: Any) -> Lowered | None:
        """Return the noted calls, if they can be done again."""
        results: list[_Result | None] = []
        for each in made if (is_list := isinstance(made, (list, tuple))) else [] if made is None else [made]:
            own = next((at for at, operand in enumerate(operands) if operand is each), None)
            if each is None:
                results.append(None)
            elif own is not None:
                results.append(_Result(own, None))
            elif type(each) is DTensor and _is_plain(each._spec):
                slot = self._slots.get(_identity(each._local_tensor))
                self._is_understood &= slot is not None and type(each._local_tensor) is torch.Tensor
                results.append(_Result(slot or 0, each._spec))
            else:
                return None
        return Lowered(self._calls, results, is_list) if self._is_understood else None

    def _add(self, tensors: Sequence[torch.Tensor]) -> None:
        for tensor in tensors:
            self._slots[_identity(tensor)] = len(self._kept)
            self._kept.append(tensor)

    def _slot_of(self, value: Any) -> Any:
        if not isinstance(value, torch.Tensor):
            return value
        slot = self._slots.get(_identity(value))
        self._is_understood &= slot is not None
        return Slot(slot or 0)


def _identity(tensor: torch.Tensor) -> Hashable:
    """Return a key that is equal for two tensors that are the same memory in the same form."""
    memory = tensor.untyped_storage()._cdata
    return memory, tensor.storage_offset(), tuple(tensor.shape), tensor.stride(), tensor.dtype


def _share_memory(operands: Sequence[Any]) -> bool:
    """Whether two operands share memory: a call would not show which of them it is given."""
    return len({operand._local_tensor.untyped_storage()._cdata for operand in operands}) < len(operands)


def _is_plain(spec: DTensorSpec) -> bool:
    return all(type(each) in (Shard, Replicate, Partial) for each in spec.placements)


def _tensors_in(made: Any) -> list[torch.Tensor]:
    return [each for each in tree_leaves(made) if isinstance(each, torch.Tensor)]


def _fill(value: Any, values: Sequence[torch.Tensor]) -> Any:
    kind = type(value)
    if kind is Slot:
        return values[value.at]
    return [_fill(each, values) for each in value] if kind is list or kind is tuple else value
