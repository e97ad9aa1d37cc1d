"""The rank's end of the local view: tensors of each rank's own, on which operations are done as torch does them."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple, cast

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Placement

from meshbook.errors import UsageError
from meshbook.tensors.messages.layouts import TensorPiece
from meshbook.tensors.messages.operations import Adopted, Factory, LocalPart, NewOutput, TensorId, Use
from meshbook.tensors.ranks import known_meshes, rank_tensors
from meshbook.tensors.ranks.known_meshes import send_pieces
from meshbook.tensors.ranks.operator_rules import CompiledTemplate
from meshbook.tensors.ranks.rank_operations import NotMade, Operations, RankTensor
from meshbook.tensors.ranks.rank_tensors import RankTensors, TensorDescription
from meshbook.torch_internals import tree_leaves, tree_map_only


class EachItsOwn(Placement):
    """The placement of a tensor of which each rank has its own."""

    def __repr__(self) -> str:
        return "each rank its own"

    def __reduce__(self) -> tuple[type[EachItsOwn], tuple[()]]:
        return EachItsOwn, ()

    def __eq__(self, other: object) -> bool:
        return isinstance(other, EachItsOwn)

    def __hash__(self) -> int:
        return hash(EachItsOwn)


class LocalOperations(Operations):
    """Operations on tensors of one rank alone. Random numbers differ from rank to rank."""

    def do(self, template: CompiledTemplate, use: Use, operands: Sequence[RankTensor]) -> list[RankTensor]:
        args, kwargs = template.fill(use, [operand.tensor for operand in operands])
        if template.is_random:
            use = use._replace(numbers=[*use.numbers[:-1], use.numbers[-1] + dist.get_rank()])
        made = self._draw_and_do(template, use, args, kwargs)
        results: list[Any] = [made] if isinstance(made, torch.Tensor) else [] if made is None else list(made)
        if template.is_random:  # drawn on the CPU, where nothing said otherwise
            results = [result.to(self._mesh.device_type) for result in results if result is not None]
        return [RankTensor(result) for result in results if result is not None]

    def read(self, operand: RankTensor) -> Any:
        return operand.tensor

    def part_of(self, whole: torch.Tensor, placements: Sequence[Placement]) -> Any:
        return whole.clone()


class LocalTensors(RankTensors):
    """The own tensors of one process."""

    def __init__(self, mesh: DeviceMesh) -> None:
        super().__init__(mesh)
        self._operations = LocalOperations(mesh)

    def make(self, number: TensorId, factory: Factory, placements: Sequence[Placement]) -> None:
        own = factory._replace(seed=factory.seed and factory.seed + dist.get_rank())
        self.place(number, own.make(), placements)

    def own(self, number: TensorId) -> torch.Tensor:
        return cast("torch.Tensor", self._of(number))

    def lay_like(self, pairs: Sequence[tuple[TensorId, TensorId]]) -> set[int]:
        """Do nothing: own tensors have one layout only."""
        return set()

    def placements(self, number: TensorId) -> Sequence[Placement]:
        return (EachItsOwn(),) * self.mesh.ndim

    def describe(self, number: TensorId) -> TensorDescription:
        shown = self.own(number)
        for dim in range(shown.dim() if shown.numel() > rank_tensors.SHOWN_ELEMENTS else 0):
            shown = shown.narrow(dim, 0, min(shown.shape[dim], rank_tensors.CORNER))
        return TensorDescription("each rank its own, here that of the first", shown.cpu(), "")

    def know(self, number: TensorId, tensor: torch.Tensor) -> Adopted:
        """Keep a tensor on the device of the mesh, from which ranks send and to which they receive."""
        self._tensors[number] = RankTensor(cast("Any", tensor.detach().to(self.mesh.device_type)))
        return Adopted(number, NewOutput.of(tensor))

    def call(self, numbers: range, function: Callable[..., Any], args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
        left = iter(numbers)
        return tree_map_only(torch.Tensor, lambda made: self.know(next(left), made), function(*args, **kwargs))

    def adopt_name(self, number: TensorId, name: str, part: LocalPart) -> Adopted:
        return self.know(number, rank_tensors.find_tensor(name))

    def reduce(
        self, number: TensorId, source: TensorId, axes: Sequence[str], reduction: str, scatter: bool
    ) -> Mapping[TensorId, str]:
        """Reduce the tensors of the ranks along axes of the mesh, from the last to the first."""
        try:
            tensor = self.own(source)
        except NotMade as refused:
            self.give_up(number, str(refused))
            return {number: str(refused)}
        made = tensor.clone(memory_format=torch.contiguous_format)
        for axis in reversed(axes):
            group = self.mesh.get_group(axis)
            size = dist.get_world_size(group)
            if reduction == "stack":
                parts = [torch.empty_like(made) for _ in range(size)]
                dist.all_gather(parts, made, group=group)
                made = torch.stack(parts)
            else:
                dist.all_reduce(made, _REDUCTIONS[reduction], group)
                made = made / size if reduction == "avg" else made
            if scatter:
                made = made.chunk(size)[dist.get_rank(group)].clone()
        self.know(number, made)
        return {}

    def move_to(self, mesh: DeviceMesh) -> None:
        self.mesh, self._operations = mesh, LocalOperations(mesh)

    def parts(self) -> tuple[dict[TensorId, LocalPart], list[TensorId]]:
        placements = (EachItsOwn(),) * self.mesh.ndim
        held = {number: each.tensor for number, each in self._tensors.items() if isinstance(each, RankTensor)}
        return {number: LocalPart.of(t, placements, t.shape, t.stride()) for number, t in held.items()}, []


_REDUCTIONS = {
    "sum": dist.ReduceOp.SUM, "avg": dist.ReduceOp.SUM, "product": dist.ReduceOp.PRODUCT, "min": dist.ReduceOp.MIN,
    "max": dist.ReduceOp.MAX,
}  # fmt: skip
REDUCTIONS = ("stack", *_REDUCTIONS)


class LocalMove(NamedTuple):
    """The sources of a move: a rank for each rank of the target."""

    source: str
    target: str
    number: TensorId
    result: TensorId
    sources: Mapping[int, int]
    shape: tuple[int, ...]
    dtype: torch.dtype


def take_copy(move: LocalMove) -> dict[TensorId, str]:
    """Send this rank's tensor to the ranks that want it, and receive the tensor for this rank."""
    me = dist.get_rank()
    box = tuple((0, size) for size in move.shape)
    pieces = [TensorPiece(source, target, box) for target, source in move.sources.items() if me in (source, target)]
    local = torch.empty(0, device="cpu")
    if me in move.sources.values():
        local = _local(move.source).own(move.number)
    if me not in move.sources:
        send_pieces(pieces, local, box, local, box)
        return {}
    there = _local(move.target)
    made = torch.empty(move.shape, dtype=move.dtype, device=there.mesh.device_type)
    if made.numel():
        send_pieces(pieces, local, box, made, box)
    there.know(move.result, made)
    return {}


def share(
    source: str, target: str, ranks: Sequence[int], number: TensorId, result: TensorId, shape: Sequence[int],
    dtype: torch.dtype,
) -> dict[TensorId, str]:  # fmt: skip
    """Keep this rank's own tensor for another mesh as well, in the same memory; zeros outside of ``ranks``."""
    there = _local(target)
    if dist.get_rank() not in ranks:
        there.know(result, torch.zeros(shape, dtype=dtype, device=there.mesh.device_type))
        return {}
    try:
        there.know(result, _local(source).own(number))
    except NotMade as refused:
        there.give_up(result, str(refused))
        return {result: str(refused)}
    return {}


def own_of(name: str, number: TensorId) -> torch.Tensor:
    """Return this rank's own tensor. Raises: UsageError where there is none."""
    try:
        return _local(name).own(number).cpu()
    except NotMade as refused:
        raise UsageError(f"there is no such tensor on this rank: {refused}") from None


def call_foreseen(
    name: str,
    foreseen: Mapping[TensorId, NewOutput],
    function: Callable[..., Any],
    args: Sequence[Any],
    kwargs: dict[str, Any],
) -> None:
    """Call a function that returns tensors of known shapes. Raises: UsageError if it returns others."""
    made = [each for each in tree_leaves(function(*args, **kwargs)) if isinstance(each, torch.Tensor)]
    if len(made) != len(foreseen):
        raise UsageError(f"{len(made)} tensors were returned, and propagate= has foreseen {len(foreseen)}")
    for tensor, output in zip(made, foreseen.values(), strict=True):
        if (tuple(tensor.shape), tensor.dtype) != (output.shape, output.dtype):
            raise UsageError(
                f"a tensor of {tuple(tensor.shape)}, {tensor.dtype} was returned, and propagate= has foreseen one of "
                f"{output.shape}, {output.dtype}"
            )
    for number, tensor in zip(foreseen, made, strict=True):
        _local(name).know(number, tensor)


def own_number(numbers: Mapping[int, int]) -> torch.Tensor:
    """Return this rank's number out of those of all ranks."""
    return torch.tensor(numbers[dist.get_rank()], device="cpu")


def _local(name: str) -> LocalTensors:
    found = known_meshes.meshes.get(name)
    assert isinstance(found, LocalTensors)
    return found
