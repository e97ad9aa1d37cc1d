"""Single operations on the tensors of one rank.

DTensor does an operation where it does it rightly, and it is done in another way where not (`operator_rules`). Random
numbers are drawn for the whole tensor, from a seed that the controller has drawn, and each rank keeps its part: so they
do not depend on the shape of the mesh, nor on the placements.
"""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from typing import Any, NamedTuple, cast

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate, Shard, distribute_tensor

from meshbook.tensors.messages.layouts import (
    from_part,
    has_empty_part,
    is_cut_along_batch,
    is_mean_of_unequal,
    is_unequal,
    strides_as,
)
from meshbook.tensors.messages.operations import LAY_OUT, ONE_HOT, REDISTRIBUTE, Use
from meshbook.tensors.ranks.lowered_operations import Lowered, LoweredOperations, way_of
from meshbook.tensors.ranks.operator_rules import (
    ATTENTION,
    GRADED,
    CompiledTemplate,
    by_heads,
    check_rows,
    has_no_way,
    is_misread,
    register_attention,
    with_nan,
)
from meshbook.tensors.ranks.partial_sums import (
    block_placements,
    end_sums,
    ended,
    full,
    listed,
    parts_like,
    said_to_lie,
    shares_memory,
    whole_of,
)
from meshbook.tensors.ranks.peer_reads import PeerReads
from meshbook.torch_internals import tree_map_only

aten = torch.ops.aten


class SharedSum(NamedTuple):
    """A sum of which ranks hold parts, and of which there are views."""

    whole: DTensor
    """The tensor that covers all of the memory."""
    holders: list[weakref.ref[RankTensor]]
    """The holders of the tensor and of its views."""


class RankTensor:
    """A mesh tensor as one rank has it.

    A view that could not share the memory of its base, since its parts lie across the base's, is made again when it is
    read after the base was written, and a write to the view is done to the base.
    """

    def __init__(self, tensor: DTensor, base: RankTensor | None = None) -> None:
        """base: the tensor whose memory this one shares."""
        self.tensor = tensor
        self.version: list[int] = [0] if base is None else base.version
        """The number of writes to the memory, in a list that all tensors in this memory share."""
        self.family: object = object()
        """An object that all views of a tensor share, in its memory or not: alike on all ranks."""
        self.sum: SharedSum | None = None
        """The other holders of a sum whose parts are on the ranks."""
        self.made: Making | None = None
        """The way in which a view was made that shares no memory with its base."""
        self.seen = 0
        """The base's version at that time."""

    @property
    def is_stale(self) -> bool:
        """Whether its base, or the base's base, was written since it was made."""
        if self.made is None:
            return False
        base = self.made.base
        return base.version[0] != self.seen or base.is_stale

    @property
    def root(self) -> RankTensor:
        return self if self.made is None else self.made.base.root


def share_sum(view: RankTensor, base: RankTensor) -> None:
    """Note a view that shares the memory of its base, if that is a sum."""
    if not any(each.is_partial() for each in view.tensor.placements):
        return
    if base.sum is None:
        base.sum = SharedSum(said_to_lie(base.tensor, base.tensor.placements), [weakref.ref(base)])
    base.sum.holders.append(weakref.ref(view))
    view.sum = base.sum


def is_shared(holder: RankTensor) -> bool:
    """Whether another holder has a view of the sum."""
    return holder.sum is not None and sum(each() is not None for each in holder.sum.holders) > 1


def end_shared_sums(operands: Sequence[RankTensor]) -> bool:
    """Reduce sums as `end_sums` does; where views share memory the values are put there, so that they still share it.

    Returns: whether there was a sum.
    """
    alone: list[DTensor] = []
    found = False
    for operand in operands:
        if not any(each.is_partial() for each in operand.tensor.placements):
            continue
        found = True
        shared, operand.sum = operand.sum, None
        alive = [holder for each in shared.holders if (holder := each()) is not None] if shared else []
        if shared is None or len(alive) == 1:
            alone.append(operand.tensor)
            continue
        memory, laid = shared.whole.to_local(), shared.whole.redistribute(placements=ended(shared.whole))
        memory.copy_(laid.to_local())
        for holder in alive:
            if holder.tensor.to_local().untyped_storage().data_ptr() == memory.untyped_storage().data_ptr():
                holder.tensor._spec = said_to_lie(holder.tensor, ended(holder.tensor))._spec
                holder.sum = None
    end_sums(alone)
    return found


class Making(NamedTuple):
    """The operation that made a view of its base."""

    template: CompiledTemplate
    use: Use
    base: RankTensor
    at: int
    """The place of the view among the results, where there are several."""

    def of(self, made: Any) -> Any:
        """Return the view, out of the results of the operation."""
        return made[self.at] if isinstance(made, (list, tuple)) else made


class Operations:
    """The operations on one device mesh."""

    def __init__(self, mesh: DeviceMesh) -> None:
        self._mesh, self._lowered = mesh, LoweredOperations()
        if mesh.device_type == "cuda":
            register_attention()
        self.peers = PeerReads(mesh)
        self.lowered: Lowered | None = None
        """The calls of the last operation, if they were known."""

    def do(self, template: CompiledTemplate, use: Use, operands: Sequence[RankTensor]) -> list[RankTensor]:
        """Do an operation; return its results. Raises: any error of the operation."""
        tensors = [self.read(operand) for operand in operands]
        if template.operator is aten.embedding.default:
            check_rows(*tensors)
        written: Sequence[RankTensor] = ()
        known = self._find(template, use, tensors)
        needs_values = not template.is_linear or len({tensor.placements for tensor in tensors}) > 1
        if known is None and needs_values and end_shared_sums(operands):
            known = self._find(template, use, tensors)
        self.lowered = known
        if known is None or template.written:
            args, kwargs = template.fill(use, tensors)
            targets = {id(target) for argument in template.written for target in listed(argument.of(args, kwargs))}
            written = [o for o, t in zip(operands, tensors, strict=True) if id(t) in targets]
            if any(operand.made is not None for operand in written):
                self._write_through(template, use, operands, written)
                return []
        if known is not None:
            made = known.do(tensors)
        elif template.can_be_lowered:
            way = way_of(template, tensors, use.numbers)
            made = self._lowered.do(way, tensors, lambda: self._do(template, use, args, kwargs, tensors))
        else:
            made = self._do(template, use, args, kwargs, tensors)
        for operand in written:
            operand.version[0] += 1
        results: list[Any] = [made] if isinstance(made, torch.Tensor) else [] if made is None else list(made)
        return [self._known(each, template, use, operands, at) for at, each in enumerate(results) if each is not None]

    def _find(self, template: CompiledTemplate, use: Use, tensors: Sequence[DTensor]) -> Lowered | None:
        return self._lowered.find(way_of(template, tensors, use.numbers)) if template.can_be_lowered else None

    def read(self, operand: RankTensor) -> DTensor:
        """Return the tensor with its present values."""
        if operand.made is not None and operand.is_stale:
            template, use, base, _ = operand.made
            args, kwargs = template.fill(use, [self.read(base)])
            made = self._do(template, use, args, kwargs, [base.tensor])
            operand.tensor, operand.seen = operand.made.of(made), base.version[0]
            operand.version[0] += 1  # for views of it
        return operand.tensor

    def _known(
        self, result: DTensor, template: CompiledTemplate, use: Use, operands: Sequence[RankTensor], at: int
    ) -> RankTensor:
        """Return a result as this rank keeps it. at: its place among the results."""
        if any(placement.is_partial() and type(placement) is not Partial for placement in result.placements):
            end_sums([result])  # it remembers what it was made of, for one use
        if not template.is_view or len(operands) != 1:
            return RankTensor(result)
        base = operands[0]
        if base.made is None and shares_memory(result, base.tensor):
            view = RankTensor(result, base)
            view.family = base.family
            share_sum(view, base)
            return view
        view = RankTensor(result)
        view.family = base.family
        view.made, view.seen = Making(template, use, base, at), base.version[0]
        return view

    def _write_through(
        self, template: CompiledTemplate, use: Use, operands: Sequence[RankTensor], written: Sequence[RankTensor]
    ) -> None:
        """Write to views across parts, by views of whole tensors, of which each rank then keeps its part."""
        wholes: dict[int, torch.Tensor] = {}
        tensors = [
            self._whole_view(o, wholes) if any(o.root is w.root for w in written) else full(o.tensor) for o in operands
        ]
        args, kwargs = template.fill(use, tensors)
        self._draw_and_do(template, use, args, kwargs)
        for root in {id(operand.root): operand.root for operand in written}.values():
            root.tensor.to_local().copy_(self.part_of(wholes[id(root)], root.tensor.placements).to_local())
            root.version[0] += 1

    def _whole_view(self, operand: RankTensor, wholes: dict[int, torch.Tensor]) -> Any:
        """Return a view of the whole of its root, which is put into ``wholes``."""
        if operand.made is None:
            end_shared_sums([operand])
            return wholes.setdefault(id(operand.root), full(operand.tensor).clone())
        template, use, base, _ = operand.made
        args, kwargs = template.fill(use, [self._whole_view(base, wholes)])
        return operand.made.of(template.operator(*args, **kwargs))

    def _do(
        self, template: CompiledTemplate, use: Use, args: list[Any], kwargs: dict[str, Any], tensors: Sequence[DTensor]
    ) -> Any:
        if template.operator is LAY_OUT:
            return self._along(*args)
        if template.operator is REDISTRIBUTE:
            return self._redistributed(*args)
        if template.operator is ONE_HOT:
            return self._one_hot(*args)
        if template.is_fused:
            return template.operator(*parts_like(args, args[0]), **parts_like(kwargs, args[0]))
        if template.apart is not None and not any(map(has_empty_part, tensors)):
            return template.apart(*args, **kwargs)
        if template.operator in ATTENTION and (laid := by_heads(template.operator, args, kwargs)) is not None:
            return self._do_by_heads(template, laid, kwargs)
        if (
            template.is_on_whole
            or template.apart is not None
            or (template.along_batch and not is_cut_along_batch(template.operator, args))
            or is_misread(template.operator, args)
            or (template.needs_equal_parts and any(map(is_unequal, tensors)))
            or (not template.bears_nothing and any(map(has_empty_part, tensors)))
        ):
            return self._do_on_whole(template, use, args, kwargs)
        try:
            if template.operator is aten.view.default and not args[0].to_local().is_contiguous():
                # the controller's order of memory is another one, and so may be what DTensor takes for its own
                args[0] = args[0].clone(memory_format=torch.contiguous_format)
            made = with_nan(template.operator(*args, **kwargs))
        except Exception as error:
            template.is_on_whole = has_no_way(error)
            return self._do_on_whole(template, use, args, kwargs)
        if isinstance(made, DTensor) and is_mean_of_unequal(made, tensors):
            return self._do_on_whole(template, use, args, kwargs)
        return made

    def _along(self, tensor: DTensor, axis: int, dim: int | None) -> DTensor:
        """Return the tensor, cut or whole along one axis."""
        wanted = [*tensor.placements]
        wanted[axis] = Replicate() if dim is None else Shard(dim)
        made = self.peers.lay_out(tensor, wanted)
        return tensor.redistribute(placements=wanted) if made is None else made

    def _redistributed(self, tensor: DTensor, layout: DTensor | Sequence[Placement]) -> DTensor:
        """Return a copy. Laid out like another tensor it is in blocks: no sums, and whole for interleaved parts."""
        wanted = block_placements(layout) if isinstance(layout, DTensor) else list(layout)
        made = self.peers.lay_out(tensor, wanted)
        return cast("DTensor", tensor.redistribute(placements=wanted).clone()) if made is None else made

    def _do_by_heads(self, template: CompiledTemplate, args: Sequence[Any], kwargs: dict[str, Any]) -> list[DTensor]:
        """Do attention on parts that are heads, or items of the batch."""
        like = next(each for each in args if isinstance(each, DTensor))
        made: list[DTensor] = []
        for local in template.operator(*tree_map_only(DTensor, DTensor.to_local, list(args)), **kwargs):
            shape = (*like.shape[:2], *local.shape[2:])
            made.append(from_part(local, self._mesh, like.placements, shape, strides_as(local.stride(), shape)))
        return made

    def _one_hot(self, indices: DTensor, num_classes: int) -> DTensor:
        """Make one-hot rows of this rank's indices. Raises: RuntimeError, as torch does, for a wrong index."""
        indices = indices.redistribute(placements=block_placements(indices))
        made, shape = ONE_HOT(indices.to_local(), num_classes), (*indices.shape, num_classes)
        return from_part(made, self._mesh, indices.placements, shape, strides_as(made.stride(), shape))

    def _do_on_whole(self, template: CompiledTemplate, use: Use, args: list[Any], kwargs: dict[str, Any]) -> Any:
        """Do an operation on whole tensors, on every rank, and keep this rank's part of tensors that it wrote to."""
        written = [argument.of(args, kwargs) for argument in template.written]
        wholes = [whole_of(value, own=any(value is each for each in written)) for value in args]
        named = {name: whole_of(value, own=any(value is each for each in written)) for name, value in kwargs.items()}
        made = self._draw_and_do(template, use, wholes, named)
        targets: dict[int, DTensor] = {}
        for argument in template.written:
            pairs = zip(listed(argument.of(args, kwargs)), listed(argument.of(wholes, named)), strict=True)
            for target, whole in pairs:
                if isinstance(target, DTensor):
                    target.to_local().copy_(self.part_of(whole, target.placements).to_local())
                    targets[id(whole)] = target

        def as_ranks_have_it(whole: torch.Tensor) -> DTensor:
            return targets[id(whole)] if id(whole) in targets else self._replicated(whole)

        return tree_map_only(torch.Tensor, as_ranks_have_it, made)

    def _draw_and_do(self, template: CompiledTemplate, use: Use, args: list[Any], kwargs: dict[str, Any]) -> Any:
        if template.operator is aten.view.default:  # the whole may lie in another order than the parts
            return args[0].reshape(args[1])
        if not template.is_random:
            with torch.set_grad_enabled(template.operator in GRADED):
                return template.operator(*args, **kwargs)
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(int(use.numbers[-1]))
            return template.operator(*args, **kwargs)

    def _replicated(self, whole: torch.Tensor) -> DTensor:
        return DTensor.from_local(whole, self._mesh, [Replicate()] * self._mesh.ndim, run_check=False)

    def part_of(self, whole: torch.Tensor, placements: Sequence[Placement]) -> DTensor:
        """Return this rank's part of a tensor that all ranks have, without the memory of the rest."""
        part = distribute_tensor(whole, self._mesh, list(placements), src_data_rank=None)
        local = part.to_local()
        if local.untyped_storage().nbytes() > local.numel() * local.element_size():
            part._local_tensor = local.clone()
        return part


class NotMade(Exception):
    """Raised for an operation that fails on all ranks alike, before any has begun with it."""
