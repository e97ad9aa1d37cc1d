"""Operations of mesh tensors as they travel: templates, which name an operator once, and their uses.

A template has the operator and its arguments, with places for tensors and floats, which change from use to use. A batch
has the new templates, the uses of templates and the tensors that nothing needs any more.
"""

from __future__ import annotations

import importlib
import math
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple, TypeAlias, cast

import torch

from meshbook.errors import FailureKind
from meshbook.tensors.messages.issued_lines import LinesOfUses
from meshbook.torch_internals import Operator, OpOverload

TensorId: TypeAlias = int

aten = torch.ops.aten

_OPERATORS = torch.library.Library("meshbook", "DEF")  # type: ignore[no-untyped-call]
_OPERATORS.define("lay_out(Tensor(a) self, int axis, int? dim) -> Tensor(a)")  # type: ignore[no-untyped-call]
_OPERATORS.impl(  # type: ignore[no-untyped-call]
    "lay_out", lambda tensor, axis, dim: torch.ops.aten.alias(tensor), "CompositeExplicitAutograd"
)

_OPERATORS.define("redistribute(Tensor self, Tensor? layout) -> Tensor")  # type: ignore[no-untyped-call]

_OPERATORS.define("one_hot(Tensor self, int num_classes) -> Tensor")  # type: ignore[no-untyped-call]
_OPERATORS.impl("one_hot", torch.nn.functional.one_hot, "CompositeExplicitAutograd")  # type: ignore[no-untyped-call]
_OPERATORS.impl(  # type: ignore[no-untyped-call]
    "one_hot", lambda indices, classes: indices.new_empty((*indices.shape, classes)), "Meta"
)

LAY_OUT: Operator = torch.ops.meshbook.lay_out.default
"""The same tensor; on the ranks cut in a dim, or whole, along one axis of the mesh."""

REDISTRIBUTE: Operator = torch.ops.meshbook.redistribute.default
"""A copy that lies in another way, with gradients elsewhere; layout: a tensor that lies so, or the placements."""

ONE_HOT: Operator = torch.ops.meshbook.one_hot.default
"""The operator for one-hot rows. torch's own is taken apart before it comes here, and finds no wrong index."""


class TensorPlace(NamedTuple):
    """The place of a tensor of the use."""

    at: int


class NumberPlace(NamedTuple):
    """The place of a number of the use; one with a dtype becomes a tensor without dims."""

    at: int
    dtype: torch.dtype | None


def is_place(value: object) -> bool:
    return isinstance(value, (TensorPlace, NumberPlace))


def fill_places(value: Any, tensors: Sequence[Any], numbers: Sequence[float], device: str = "cpu") -> Any:
    """Return an argument of a template with the tensors and numbers of a use. device: of tensors without dims."""
    kind = type(value)
    if kind is TensorPlace:
        return tensors[value.at]
    if kind is NumberPlace:
        number = numbers[value.at]
        return number if value.dtype is None else torch.tensor(number, dtype=value.dtype, device=device)
    if kind is list or kind is tuple:
        return [fill_places(each, tensors, numbers, device) for each in value]
    return value


class NewOutput(NamedTuple):
    """A result that is a tensor of its own."""

    shape: tuple[int, ...]
    strides: tuple[int, ...]
    dtype: torch.dtype

    @classmethod
    def of(cls, tensor: torch.Tensor) -> NewOutput:
        return cls(tuple(tensor.shape), tuple(tensor.stride()), tensor.dtype)

    @classmethod
    def in_order(cls, shape: Sequence[int], dtype: torch.dtype) -> NewOutput:
        """Return a result whose elements lie in C order."""
        return cls(tuple(shape), contiguous_strides(shape), dtype)


def contiguous_strides(shape: Sequence[int]) -> tuple[int, ...]:
    return tuple(math.prod(max(size, 1) for size in shape[dim + 1 :]) for dim in range(len(shape)))


class Template(NamedTuple):
    """An operator, ``aten.add.Tensor``, and its arguments with places in them."""

    number: int
    operator: str
    args: Sequence[Any]
    kwargs: dict[str, Any]


class Use(NamedTuple):
    """An operation: the tensors and numbers that it reads, and the numbers of its results."""

    template: int
    tensors: Sequence[TensorId]
    numbers: Sequence[float]
    results: Sequence[TensorId]


class OperationBatch(NamedTuple):
    """The operations that one message carries, in the order in which they were issued."""

    first: int
    """The number of its first operation: those of a mesh are numbered one after the other."""
    templates: Sequence[Template]
    uses: Sequence[tuple[Any, ...]]
    """The fields of a `Use` each: plain tuples are pickled in a fifth of the time."""
    lines: LinesOfUses
    freed: Sequence[TensorId]
    hunted: str = ""
    """The kind of value that results are searched for."""


WAIT = -1
"""The mark of a wait in the place of a template: no rank goes on before all have come as far, and gradients, the first
of each pair of tensors, lie as their parameters do.
"""


class Recording(NamedTuple):
    """A step that ranks can repeat.

    Its inputs, results and tensors in between have negative numbers, which are free again after each time. Tensors from
    before the step, and tensors that it leaves behind, have the same number each time.
    """

    number: TensorId
    templates: Sequence[Template]
    uses: Sequence[tuple[Any, ...]]
    ends: Sequence[Sequence[TensorId]]
    """The tensors that nothing needs any more after each use."""
    lines: LinesOfUses
    inputs: Sequence[TensorId]
    results: Sequence[TensorId]


class Replay(NamedTuple):
    """A message to do a step once more. recording: for ranks that do not know it yet."""

    first: int
    """The number that it has among the operations."""
    number: TensorId
    """The number of the recording."""
    turn: int
    """A number that no other repetition has."""
    recording: Recording | None
    inputs: Sequence[TensorId]
    numbers: dict[int, Sequence[float]]
    """The numbers of those uses for which they differ from the recording."""
    results: Sequence[TensorId]
    freed: Sequence[TensorId]
    hunted: str = ""


class TensorReference(NamedTuple):
    """A mesh tensor on its way to the ranks, who have it."""

    mesh: str
    shown: str
    number: TensorId


class Adopted(NamedTuple):
    """A DTensor that code on the ranks has made, and that they know by its number from now on."""

    number: TensorId
    output: NewOutput


class LocalPart(NamedTuple):
    """The part of a tensor that a rank holds."""

    placements: Sequence[Any]
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    dtype: torch.dtype
    local_shape: tuple[int, ...]
    local_strides: tuple[int, ...]
    shares: tuple[TensorId, int] | None = None
    """The tensor in whose memory the part lies, and its offset there in elements."""

    @classmethod
    def of(
        cls, local: torch.Tensor, placements: Sequence[Any], shape: Sequence[int], strides: Sequence[int]
    ) -> LocalPart:
        """Describe a rank's part of a tensor with this shape, these strides and placements."""
        return cls(placements, tuple(shape), tuple(strides), local.dtype, tuple(local.shape), local.stride())


class Undone(NamedTuple):
    """A row of operations, by their numbers, that a rank has not done and never will do."""

    first: int
    end: int
    """The number behind the last."""
    within: int = 0
    """The number of operations done of the first, if that is a recorded step."""

    def has(self, write: Write) -> bool:
        return self.first <= write.number < self.end and (write.number > self.first or write.within >= self.within)


class Write(NamedTuple):
    """An operation that wrote to a tensor, or was to."""

    number: int
    within: int = 0
    """The place of the operation in a recorded step."""


Box: TypeAlias = tuple[tuple[int, int], ...]
"""A part of a tensor: where it begins and ends along each dim."""


class SentTensor(NamedTuple):
    """A tensor of the controller, as some of the ranks are sent it."""

    number: TensorId
    placements: Sequence[Any]
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    pieces: Sequence[torch.Tensor]
    parts: Mapping[int, tuple[int, Box]]
    """The part that each rank keeps: the index of the piece, and a box of that."""


class PartTransfer(NamedTuple):
    """A part that a rank is to be given by another one, which holds an equal part."""

    number: TensorId
    source: int
    target: int
    part: LocalPart


class OperationFailed(RuntimeError):
    """Raised on a rank at an operation that failed; the rank halts until it is told which others fail with it."""

    def __init__(
        self, index: int, operator: str, place: str, why: str, within: int = 0, kind: FailureKind = FailureKind.RAISED
    ) -> None:
        """index: the number of the operation, or of the recorded step that it is a part of. place: its line.

        within: its place in that step.
        """
        super().__init__(index, operator, place, why, within, kind)
        self.index, self.operator, self.place, self.why, self.within = index, operator, place, why, within
        self.kind = kind

    def __str__(self) -> str:
        return f"{self.operator} ({self.place}) failed: {self.why}" if self.place else f"{self.operator}: {self.why}"


class HaltedAt(NamedTuple):
    """The progress of a rank that may have halted."""

    number: int
    """The number of the operation that it does next."""
    families: Sequence[Sequence[TensorId]]
    """The tensors in the same memory as each of those asked for."""


_DEFINED_LATE = {"torch_nn": "torch.nn.modules.linear_cross_entropy"}
"""Modules of torch that define operators only when they are imported, by the namespace."""


def find_operator(name: str) -> Operator:
    """Return the operator of this name. Raises: AttributeError if this torch does not have it."""
    namespace, operator, overload = name.split(".")
    if namespace in _DEFINED_LATE:
        importlib.import_module(_DEFINED_LATE[namespace])
    found = getattr(getattr(getattr(torch.ops, namespace), operator), overload)
    assert isinstance(found, OpOverload)
    return found


_DRAWS_NOTHING = (aten._scaled_dot_product_flash_attention_for_cpu.default,)
"""Operators that draw numbers by their schema, and never do."""


def is_random(operator: Operator) -> bool:
    """Whether an operator draws numbers; the last number of its uses is the seed for that."""
    return torch.Tag.nondeterministic_seeded in operator.tags and operator not in _DRAWS_NOTHING


def gives_alias(operator: Operator) -> bool:
    """Whether results are in the memory of an argument: views, or the argument that was written."""
    return any(result.alias_info is not None for result in operator._schema.returns)


_WRITES_UNSAID = {torch.ops.aten.native_batch_norm.default: (3, 4)}
"""The arguments that operators write to without a word in their schemas: the running statistics."""


class WrittenArgument(NamedTuple):
    """An argument that an operator writes to, given by position or by name."""

    at: int
    name: str

    def of(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        return args[self.at] if self.at < len(args) else kwargs.get(self.name)


def written_arguments(operator: Operator) -> tuple[WrittenArgument, ...]:
    """Return the arguments that an operator writes to."""
    unsaid = _WRITES_UNSAID.get(operator, ())
    return tuple(
        WrittenArgument(at, argument.name)
        for at, argument in enumerate(operator._schema.arguments)
        if at in unsaid or (argument.alias_info is not None and argument.alias_info.is_write)
    )


class Factory(NamedTuple):
    """A tensor that ranks make: a function of torch, with the seed for one that draws numbers."""

    function: str
    args: tuple[Any, ...]
    dtype: torch.dtype
    seed: int = 0

    def make(self, device: str = "cpu") -> torch.Tensor:
        """Make the whole tensor, equal on all ranks. device: where to make one without a seed."""
        function = getattr(torch, self.function)
        if not self.seed:
            return cast("torch.Tensor", function(*self.args, dtype=self.dtype, device=device))
        drawing = torch.Generator(device="cpu").manual_seed(self.seed)
        made = function(*self.args, dtype=self.dtype, generator=drawing, device="cpu")
        return cast("torch.Tensor", made)
