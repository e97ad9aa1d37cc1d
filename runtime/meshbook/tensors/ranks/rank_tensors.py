"""The rank's end of mesh tensors: their DTensors by number, and the questions that the controller asks about them.

A tensor that ranks make has the values that torch makes in one piece, on any mesh and in any layout, and a rank has
memory for its part only where that can be. Random numbers come of one sequence, so those before a part are drawn as
well, piece by piece, and thrown away.
"""

from __future__ import annotations

import itertools
import math
import re
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple, cast

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement, Replicate

from meshbook.errors import UsageError
from meshbook.tensors.messages.layouts import are_in_blocks, from_part, own_copy, strides_as
from meshbook.tensors.messages.operations import (
    Adopted,
    Factory,
    LocalPart,
    NewOutput,
    PartTransfer,
    SentTensor,
    TensorId,
)
from meshbook.tensors.ranks.partial_sums import block_placements, full
from meshbook.tensors.ranks.rank_batches import RankBatches
from meshbook.tensors.ranks.rank_operations import NotMade, Operations, RankTensor
from meshbook.torch_internals import local_shape_and_offset, tree_leaves, tree_map_only

CORNER = 6
"""The number of elements along each dim that are shown of a large tensor."""
SHOWN_ELEMENTS = 1000
"""The most elements of a tensor that is shown whole."""


class TensorDescription(NamedTuple):
    """A tensor as it is shown to people."""

    placements: str
    shown: torch.Tensor
    statistics: str

    def values(self, indent: int) -> str:
        """Return the numbers as torch prints them, with the further lines indented by so many spaces."""
        text = re.sub(r"(,\s+(size|dtype)=[^\n]*)?\)$", "", repr(self.shown).removeprefix("tensor("))
        return text.replace("\n" + " " * len("tensor("), "\n" + " " * indent)


class RankTensors(RankBatches):
    """The mesh tensors of one process, as the controller makes, asks for and brings back single ones."""

    position = 0
    """The position of this process among those of the mesh."""

    def place(self, number: TensorId, whole: torch.Tensor, placements: Sequence[Placement]) -> None:
        """Take this rank's part of a tensor that all ranks were sent."""
        self._tensors[number] = RankTensor(self._operations.part_of(whole.to(self.mesh.device_type), placements))

    def take(self, tensors: Sequence[SentTensor]) -> None:
        """Keep this rank's parts of tensors of the controller, each in memory of its own and no more of it."""
        taken: set[int] = set()
        for sent in tensors:
            piece, box = sent.parts[dist.get_rank()]
            local = sent.pieces[piece][tuple(slice(*ends) for ends in box)].to(self.mesh.device_type)
            memory = local.untyped_storage()
            if memory.nbytes() > local.numel() * local.element_size() or memory.data_ptr() in taken:
                local = own_copy(local)
            taken.add(memory.data_ptr())
            self.keep(sent.number, local, LocalPart.of(local, sent.placements, sent.shape, sent.strides))

    def make(self, number: TensorId, factory: Factory, placements: Sequence[Placement]) -> None:
        """Take this rank's part of a tensor that is made here, without memory for the whole where that can be."""
        shape, made = shape_of(factory), None
        if are_in_blocks(placements):
            place = local_shape_and_offset(shape, self.mesh, placements)
            made = make_part(factory, *place, self.mesh.device_type)
        if made is None:
            self.place(number, factory.make(), placements)
            return
        made = made.to(self.mesh.device_type)
        self.keep(number, made, LocalPart.of(made, tuple(placements), shape, strides_as(made.stride(), shape)))

    def layout_of(self, number: TensorId) -> Sequence[Placement]:
        """Return the placements of a tensor like this one in blocks: sums are done, and interleaved parts whole."""
        try:
            return block_placements(self._of(number))
        except NotMade:
            return (Replicate(),) * self.mesh.ndim

    def layouts(self, numbers: Sequence[TensorId]) -> list[Sequence[Placement]]:
        """Return `layout_of` each of these."""
        return [self.layout_of(number) for number in numbers]

    def keep(self, number: TensorId, local: torch.Tensor, part: LocalPart) -> None:
        """Keep this rank's part of a tensor."""
        self._tensors[number] = RankTensor(self._from_part(local, part))

    def whole(self, number: TensorId) -> torch.Tensor | None:
        """Return the whole tensor, on the first rank of the mesh; a collective."""
        tensor = self._of(number)
        made = self._operations.peers.lay_out(tensor, [Replicate()] * self.mesh.ndim, only=[0])
        found = full(tensor) if made is None else made.to_local()
        return found.cpu() if self._is_first else None

    def local(self, number: TensorId) -> torch.Tensor:
        """Return this rank's part of a tensor."""
        return self._of(number).to_local().detach()

    def placements(self, number: TensorId) -> Sequence[Placement]:
        """Return the placements of a tensor."""
        return self._of(number).placements

    def describe(self, number: TensorId) -> TensorDescription | None:
        """Return a tensor as it is shown, on the first rank of the mesh; a collective."""
        tensor = self._of(number)
        corner, statistics = cast("torch.Tensor", tensor), ""
        if tensor.numel() > SHOWN_ELEMENTS:
            if tensor.is_floating_point():
                numbers = [float(full(each)) for each in (tensor.mean(), tensor.std(), tensor.min(), tensor.max())]
                statistics = "mean {:.4g}, std {:.4g}, min {:.4g}, max {:.4g}".format(*numbers)
            for dim, size in enumerate(tensor.shape):
                corner = corner.narrow(dim, 0, min(size, CORNER))
        shown, lies = full(corner), ", ".join(map(repr, tensor.placements))
        return TensorDescription(lies, shown.cpu(), statistics) if self._is_first else None

    # ---- tensors of code on the ranks -------------------------------------------------------------------------------

    def call(self, numbers: range, function: Callable[..., Any], args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
        """Call a function; the DTensors that it returns are kept under ``numbers``. Raises: UsageError for more."""
        made = function(*args, **kwargs)
        if (count := sum(isinstance(each, DTensor) for each in tree_leaves(made))) > len(numbers):
            raise UsageError(f"{count} DTensors are more than come back of one call, {len(numbers)}: return fewer")
        left = iter(numbers)
        return tree_map_only(DTensor, lambda tensor: self._adopt(next(left), tensor), made)

    def look(self, name: str) -> LocalPart:
        """Describe the tensor that cells of this rank call ``name``; one of its own has no placements."""
        found = find_tensor(name)
        if found.layout is not torch.strided:
            raise UsageError(f"{name} is a sparse tensor ({found.layout}) on rank {dist.get_rank()}: use to_dense()")
        if isinstance(found, DTensor):
            self._check_mesh(found)
            return _part_of(found)
        return LocalPart.of(found, (), found.shape, found.stride())

    def adopt_name(self, number: TensorId, name: str, part: LocalPart) -> Adopted:
        """Keep the tensor that cells of this rank call ``name``, as a part of one."""
        found = find_tensor(name)
        return self._adopt(number, found if isinstance(found, DTensor) else self._from_part(found, part))

    def _adopt(self, number: TensorId, tensor: DTensor) -> Adopted:
        self._check_mesh(tensor)
        self._tensors[number] = RankTensor(cast("DTensor", tensor.detach()))
        return Adopted(number, NewOutput.of(tensor))

    def _check_mesh(self, tensor: DTensor) -> None:
        if tensor.device_mesh != self.mesh:
            raise UsageError(f"a DTensor on another mesh, {tensor.device_mesh}, cannot be known as one of {self.mesh}")

    def reference(self, number: TensorId) -> DTensor:
        """Return the tensor for code on the rank."""
        return self._of(number)

    # ---- after a repair ---------------------------------------------------------------------------------------------

    def move_to(self, mesh: DeviceMesh) -> None:
        """Go on with groups that were formed again."""
        self.mesh, self._operations = mesh, Operations(mesh)
        for step in self._steps.values():
            step.forget(plan=True)
        for held in self._tensors.values():
            if isinstance(held, RankTensor):
                held.tensor = self._from_part(held.tensor.to_local(), _part_of(held.tensor))

    def parts(self) -> tuple[dict[TensorId, LocalPart], list[TensorId]]:
        """Return the parts that this rank holds, and views to give up, which new ranks could not know as views."""
        held = {number: each for number, each in self._tensors.items() if isinstance(each, RankTensor)}
        largest_first = sorted(held, key=lambda number: (-held[number].tensor.numel(), number))
        bases: dict[int, TensorId] = {}
        parts: dict[TensorId, LocalPart] = {}
        for number in largest_first:
            base = bases.setdefault(id(held[number].version), number)
            local, memory = held[number].tensor.to_local(), held[base].tensor.to_local()
            part = _part_of(held[number].tensor)
            if base == number:
                parts[number] = part
            elif memory.is_contiguous():
                behind = int(local.storage_offset()) - int(memory.storage_offset())
                parts[number] = part._replace(shares=(base, behind))
        given_up = [number for number in held if number not in parts or held[number].made is not None]
        return {number: part for number, part in parts.items() if number not in given_up}, given_up

    def transfer(self, transfers: Sequence[PartTransfer], lost: Mapping[TensorId, str]) -> None:
        """Give and take parts, in one order on all ranks; a part in the memory of another comes behind it.

        lost: tensors that are gone, and why. Ranks that still have one would take a tensor in its memory for another
        thing than new ranks do.
        """
        me = dist.get_rank()
        for number in lost.keys() & self._tensors.keys():
            self.give_up(number, lost[number])
        self._undone.clear()
        for number, source, target, part in transfers:
            held = self._tensors.get(number)
            if part.shares is not None:
                if me == target and held is None:
                    base = self._operand(part.shares[0])
                    memory = base.tensor.to_local()
                    begin = int(memory.storage_offset()) + part.shares[1]
                    local = memory.as_strided(part.local_shape, part.local_strides, begin)
                    self._tensors[number] = RankTensor(self._from_part(local, part), base)
            elif me == source:
                dist.send(self._of(number).to_local().contiguous(), target)
            elif me == target:
                local = torch.empty(part.local_shape, dtype=part.dtype, device=self.mesh.device_type)
                dist.recv(local, source)
                if isinstance(held, RankTensor):
                    held.tensor.to_local().copy_(local)
                else:
                    self.keep(number, local, part)
        for each in self._tensors.values():
            if isinstance(each, RankTensor):
                each.family = each.version  # new ranks know of no other views than those that share memory

    def _from_part(self, local: torch.Tensor, part: LocalPart) -> DTensor:
        return from_part(local, self.mesh, part.placements, part.shape, part.strides)

    @property
    def _is_first(self) -> bool:
        return dist.get_rank() == int(self.mesh.mesh.flatten()[0])


def _part_of(tensor: DTensor) -> LocalPart:
    return LocalPart.of(tensor.to_local(), tensor.placements, tensor.shape, tensor.stride())


def find_tensor(name: str) -> torch.Tensor:
    """Return the tensor that cells of this rank call ``name``."""
    found = vars(sys.modules["__main__"]).get(name)
    if not isinstance(found, torch.Tensor):
        raise UsageError(f"{name} is no tensor on rank {dist.get_rank()}, but {type(found).__name__}")
    return found


UNIFORM = ("zeros", "ones", "full")
DRAWN = {"rand": 0, "randn": 0, "randint": 2}
"""The functions that draw numbers, and the index of the argument that is the shape."""
PIECE_ELEMENTS = 1 << 20
"""The number of random numbers, about, that are drawn at a time."""
DRAWN_TOGETHER = 16
"""The block of numbers that `torch.randn` draws together; the last block of a tensor is drawn again."""


def shape_of(factory: Factory) -> tuple[int, ...]:
    """Return the shape of the whole tensor."""
    if factory.function == "arange":
        return tuple(torch.arange(*factory.args, dtype=factory.dtype, device="meta").shape)
    return tuple(factory.args[DRAWN.get(factory.function, 0)])


def make_part(factory: Factory, sizes: Sequence[int], begin: Sequence[int], device: str = "cpu") -> torch.Tensor | None:
    """Return the part of these sizes that begins there; None if the whole has to be made for it.

    device: where to make it. Random numbers are drawn on the CPU, so that they are the same everywhere.
    """
    if factory.function in UNIFORM:
        return factory._replace(args=(tuple(sizes), *factory.args[1:])).make(device)
    return _draw(factory, sizes, begin) if factory.function in DRAWN else None


def _draw(factory: Factory, sizes: Sequence[int], begin: Sequence[int]) -> torch.Tensor | None:
    """Return rows of the whole, drawn some at a time; None where a few rows are many numbers, or there are no more."""
    shape, at = shape_of(factory), DRAWN[factory.function]
    if not math.prod(sizes):
        return torch.empty(tuple(sizes), dtype=factory.dtype, device="cpu")
    each = math.prod(shape[1:])
    together = DRAWN_TOGETHER // math.gcd(each, DRAWN_TOGETHER)
    rows = max(PIECE_ELEMENTS // max(each * together, 1), 1) * together
    if not shape or rows >= shape[0]:
        return None
    ends = [*range(rows, shape[0], rows), shape[0]]
    if (ends[-1] - ends[-2]) * each < DRAWN_TOGETHER:
        del ends[-2]
    function, generator = getattr(torch, factory.function), torch.Generator().manual_seed(factory.seed)
    made = torch.empty(tuple(sizes), dtype=factory.dtype, device="cpu")
    inner = tuple(slice(first, first + size) for first, size in zip(begin[1:], sizes[1:], strict=True))
    first, last = begin[0], begin[0] + sizes[0]
    for start, end in itertools.pairwise([0, *ends]):
        if start >= last:
            break
        args = (*factory.args[:at], (end - start, *shape[1:]), *factory.args[at + 1 :])
        piece = function(*args, dtype=factory.dtype, generator=generator, device="cpu")
        low, high = max(start, first), min(end, last)
        if low < high:
            made[low - first : high - first] = piece[(slice(low - start, high - start), *inner)]
    return made
