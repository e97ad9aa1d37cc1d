"""Operations of mesh tensors as they travel: templates, which name an operator once, and their uses.

A template has the operator and its arguments, with places for what changes from use to use: tensors, by their number,
and floats. A batch is the templates that are new, the uses of templates and the tensors that nobody needs any more.
"""

from __future__ import annotations

import importlib
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple, TypeAlias, cast

import torch

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
"""torch's own is taken apart before it comes here, into comparisons that find nothing wrong with any index."""


class TensorPlace(NamedTuple):
    """Where a tensor of the use is to be put."""

    at: int


class NumberPlace(NamedTuple):
    """Where a number of the use is to be put; of a dtype it becomes a tensor without dims."""

    at: int
    dtype: torch.dtype | None


class NewOutput(NamedTuple):
    """A result that is a tensor of its own."""

    shape: tuple[int, ...]
    strides: tuple[int, ...]
    dtype: torch.dtype


class Template(NamedTuple):
    """An operator, ``aten.add.Tensor``, and its arguments with places in them."""

    number: int
    operator: str
    args: Sequence[Any]
    kwargs: dict[str, Any]


class Use(NamedTuple):
    """One operation: what it reads, and what its results are called."""

    template: int
    tensors: Sequence[TensorId]
    numbers: Sequence[float]
    results: Sequence[TensorId]


class OperationBatch(NamedTuple):
    """What one message carries, in the order in which it was issued."""

    first: int
    """The number of its first operation: those of a mesh are numbered one after the other."""
    templates: Sequence[Template]
    uses: Sequence[tuple[Any, ...]]
    """Each the fields of a `Use`: plain tuples are pickled in a fifth of the time."""
    lines: LinesOfUses
    freed: Sequence[TensorId]
    hunted: str = ""
    """What results are searched for."""


WAIT = -1
"""Stands for a template: here no rank goes on before all have come as far, and gradients, the first of each pair of
tensors, lie as their parameters do."""


class Recording(NamedTuple):
    """A step that ranks can repeat. What it is given, makes and gives back has negative numbers, which are free again
    after each time; what it leaves behind has the same number each time, and so has what was there before."""

    number: TensorId
    templates: Sequence[Template]
    uses: Sequence[tuple[Any, ...]]
    ends: Sequence[Sequence[TensorId]]
    """What nobody needs any more, after each use."""
    lines: LinesOfUses
    inputs: Sequence[TensorId]
    results: Sequence[TensorId]


class Replay(NamedTuple):
    """One message: a step once more. recording: for ranks that do not know it yet."""

    first: int
    """The number that it has among the operations."""
    number: TensorId
    """Of the recording."""
    turn: int
    """Tells this time from all others."""
    recording: Recording | None
    inputs: Sequence[TensorId]
    numbers: dict[int, Sequence[float]]
    """Those of the uses whose numbers are others than when it was recorded."""
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
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    dtype: torch.dtype


class LocalPart(NamedTuple):
    """What a rank holds of a tensor."""

    placements: Sequence[Any]
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    dtype: torch.dtype
    local_shape: tuple[int, ...]
    local_strides: tuple[int, ...]
    shares: tuple[TensorId, int] | None = None
    """The tensor in whose memory it lies, and how many elements behind its beginning."""


class Undone(NamedTuple):
    """Operations that a rank has not done, one behind the other, and never will."""

    first: int
    end: int
    """The number behind the last."""
    within: int = 0
    """Of the first, if that is a recorded step: how many of its operations were done."""

    def has(self, write: Write) -> bool:
        return self.first <= write.number < self.end and (write.number > self.first or write.within >= self.within)


class Write(NamedTuple):
    """An operation that wrote to a tensor, or was to."""

    number: int
    within: int = 0
    """Its place in a recorded step."""


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
    """What each rank is to keep: of which piece, and what of that."""


class PartTransfer(NamedTuple):
    """A part that a rank is to be given by another one, which holds an equal part."""

    number: TensorId
    source: int
    target: int
    part: LocalPart


class OperationFailed(RuntimeError):
    """An operation failed on a rank, which does nothing that is behind it until it is told what the failure costs."""

    def __init__(self, index: int, operator: str, place: str, why: str, within: int = 0) -> None:
        """index: the number of the operation, or of the recorded step that it is a part of. place: its line.

        within: its place in that step.
        """
        super().__init__(index, operator, place, why, within)
        self.index, self.operator, self.place, self.why, self.within = index, operator, place, why, within

    def __str__(self) -> str:
        return f"{self.operator} ({self.place}) failed: {self.why}" if self.place else f"{self.operator}: {self.why}"


class HaltedAt(NamedTuple):
    """How far a rank has come that may have halted."""

    number: int
    """The number of the operation that it does next."""
    families: Sequence[Sequence[TensorId]]
    """The tensors that lie in the same memory as one of those that were asked for."""


_DEFINED_LATE = {"torch_nn": "torch.nn.modules.linear_cross_entropy"}
"""Modules of torch that define operators only when something of theirs is used, by the namespace."""


def find_operator(name: str) -> Operator:
    """The operator that ``str`` of it names. Raises: AttributeError if this torch does not have it."""
    namespace, operator, overload = name.split(".")
    if namespace in _DEFINED_LATE:
        importlib.import_module(_DEFINED_LATE[namespace])
    found = getattr(getattr(getattr(torch.ops, namespace), operator), overload)
    assert isinstance(found, OpOverload)
    return found


_DRAWS_NOTHING = (aten._scaled_dot_product_flash_attention_for_cpu.default,)
"""It could, by its schema, and refuses to."""


def is_random(operator: Operator) -> bool:
    """Whether an operator draws numbers; the last number of its uses is the seed for that."""
    return torch.Tag.nondeterministic_seeded in operator.tags and operator not in _DRAWS_NOTHING


def gives_alias(operator: Operator) -> bool:
    """Whether results are in the memory of an argument: views, or what was written."""
    return any(result.alias_info is not None for result in operator._schema.returns)


_WRITES_UNSAID = {torch.ops.aten.native_batch_norm.default: (3, 4)}
"""Arguments that operators write to though their schemas do not say so: the running statistics."""


class WrittenArgument(NamedTuple):
    """One that an operator writes to, given by position or by name."""

    at: int
    name: str

    def of(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        return args[self.at] if self.at < len(args) else kwargs.get(self.name)


def written_arguments(operator: Operator) -> tuple[WrittenArgument, ...]:
    """The arguments that an operator writes to."""
    unsaid = _WRITES_UNSAID.get(operator, ())
    return tuple(
        WrittenArgument(at, argument.name)
        for at, argument in enumerate(operator._schema.arguments)
        if at in unsaid or (argument.alias_info is not None and argument.alias_info.is_write)
    )


class Factory(NamedTuple):
    """How ranks make a tensor of their own: a function of torch, with the seed for one that draws numbers."""

    function: str
    args: tuple[Any, ...]
    dtype: torch.dtype
    seed: int = 0

    def make(self, device: str = "cpu") -> torch.Tensor:
        """The whole tensor, equal on all ranks. device: where to make one without a seed."""
        function = getattr(torch, self.function)
        if not self.seed:
            return cast("torch.Tensor", function(*self.args, dtype=self.dtype, device=device))
        drawing = torch.Generator(device="cpu").manual_seed(self.seed)
        made = function(*self.args, dtype=self.dtype, generator=drawing, device="cpu")
        return cast("torch.Tensor", made)
