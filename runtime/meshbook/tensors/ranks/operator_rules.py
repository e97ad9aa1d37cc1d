"""The rules for operators on DTensors: which of them DTensor does rightly, and how each of the others is done.

An operator for which DTensor cannot keep the shards apart is done on whole tensors by every rank, which is slower and
always right. An operator that DTensor gets wrong is done on whole tensors as well (`WHOLE`), or made of others
(`APART`), or done on parts where that gives the same (`ATTENTION`).

Attention on a GPU goes by the operators that torch has for CPUs, since the controller, which has no GPU, picks them.
Forward and backward are torch's own attention, which picks the kernel. The operator for CPUs keeps values for its
backward pass that kernels of GPUs do not have; they are left empty, and the backward pass begins again. That is right
since torch takes this operator only where there is no dropout.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.distributed.tensor import DTensor, Placement, Replicate
from torch.nn.functional import scaled_dot_product_attention

from meshbook.tensors.messages.layouts import from_part, has_empty_part, splits_unequally
from meshbook.tensors.messages.operations import (
    REDISTRIBUTE,
    Template,
    Use,
    fill_places,
    find_operator,
    gives_alias,
    is_random,
    written_arguments,
)
from meshbook.torch_internals import (
    DispatchKey,
    Operator,
    SetExcludeDispatchKeyGuard,
    decomposition_table,
    functional_collectives,
)

aten = torch.ops.aten

APART = frozenset(
    {
        aten.binary_cross_entropy_backward.default, aten.huber_loss_backward.default, aten.mse_loss_backward.default,
        aten.smooth_l1_loss_backward.default,
        aten.logsumexp.default,
        aten.nll_loss_forward.default, aten.nll_loss2d_forward.default,
    }
)  # fmt: skip
"""Operators that are made of others. DTensor 2.13 divides these gradients by the size of a part, takes a dim that is
kept for one that is gone, and takes the mean of parts' means where items have weights, or are ignored.
"""

WHOLE = frozenset(
    {
        "_index_put_impl", "argmax", "argmin", "gather", "index_copy", "index_put", "linalg_pinv",
        "multi_margin_loss_backward", "multilabel_margin_loss_backward",
        "native_batch_norm", "scatter_add", "select_backward", "soft_margin_loss_backward", "squeeze_copy", "view_copy",
    }
)  # fmt: skip
"""Operators for which DTensor 2.13 gives wrong values, or fails, where a dim is sharded; in place as well."""

LINEAR = frozenset(
    {
        aten.add.Tensor, aten.sub.Tensor, aten.neg.default, aten.clone.default, REDISTRIBUTE,
        aten.empty_like.default, aten.full_like.default, aten.ones_like.default, aten.zeros_like.default,
    }
)  # fmt: skip
"""Operators that turn sums whose parts are on the ranks into such sums, as views do, or that read no values; others
are given done sums."""

EASY_VIEWS = frozenset(
    {
        aten.alias.default, aten.detach.default, aten.permute.default, aten.t.default, aten.transpose.int,
        aten.unsqueeze.default,
    }
)  # fmt: skip
"""Views that DTensor does rightly whether parts are equal or not."""

UNVIEWS = frozenset({aten._unsafe_view.default, aten.slice_backward.default})
"""Operators that are no views, and that DTensor gets wrong where parts are unequal, as it does views."""

ALONG_BATCH = frozenset(
    {
        aten.convolution.default, aten.convolution_backward.default, aten.native_group_norm.default,
        aten.native_group_norm_backward.default,
    }
)  # fmt: skip
"""Operators that DTensor does on parts that do not fit each other, unless only the batch is sharded."""


ATTENTION = frozenset(
    {
        aten._scaled_dot_product_flash_attention_for_cpu.default,
        aten._scaled_dot_product_flash_attention_for_cpu_backward.default,
    }
)
"""Operators that DTensor does not know; each head of each item of the batch is independent."""

GRADED = frozenset({aten.mkldnn_rnn_layer.default})
"""Operators that return the tensors for their gradients only where gradients are wanted."""


WRITTEN_APART = frozenset(
    {
        aten.abs_.default, aten.copy_.default, aten.fill_.Scalar, aten.fill_.Tensor, aten.gelu_.default,
        aten.hardswish_.default, aten.masked_fill_.Scalar, aten.masked_fill_.Tensor, aten.mish_.default,
        aten.threshold_.default, aten.zero_.default,
    }
)  # fmt: skip
"""Operators that work in place and that DTensor does rightly, beside the pointwise ones. Of others DTensor may take the
tensor for one that lies in another way afterwards.
"""

BEARS_NOTHING = frozenset(
    {
        aten.addmm.default, aten.baddbmm.default, aten.bmm.default, aten.embedding.default, aten.mm.default,
        aten.sum.default, aten.sum.dim_IntList,
    }
)  # fmt: skip
"""Operators that DTensor does rightly where a rank's part is empty, beside the pointwise ones."""


class CompiledTemplate:
    """A template with its operator found."""

    def __init__(self, template: Template, device: str) -> None:
        """device: the kind on which the ranks have their tensors; ``cpu`` for the controller."""
        self.name = template.operator
        self.operator = find_operator(template.operator)
        self.args, self.kwargs = template.args, template.kwargs
        schema = self.operator._schema
        self.written = written_arguments(self.operator)
        self.is_view = not self.written and gives_alias(self.operator)
        self.needs_equal_parts = self.operator in UNVIEWS or (self.is_view and self.operator not in EASY_VIEWS)
        self.is_random = is_random(self.operator)
        if "device" in self.kwargs and not self.is_random:  # numbers are drawn on the CPU, for the same everywhere
            self.kwargs = {**self.kwargs, "device": torch.device(device)}
        self.is_fused = self.name.startswith("aten._fused_") and bool(self.written)
        base_name = self.name.split(".")[1].removesuffix("_")
        named = zip(schema.arguments, self.args, strict=False)
        reduces_all = any(argument.name == "dim" and value == [] for argument, value in named)
        is_pointwise = torch.Tag.pointwise in self.operator.tags
        is_written_apart = is_pointwise or base_name.startswith("_foreach_") or self.operator in WRITTEN_APART
        self.is_on_whole = (
            self.is_random or base_name in WHOLE
            or self.operator in ATTENTION  # where it is not done by heads
            or reduces_all  # DTensor takes [] for no dim
            or (bool(self.written) and not is_written_apart and not self.is_fused)
        )  # fmt: skip
        """Whether DTensor has no way to do it on shards."""
        self.is_linear = self.is_view or self.operator in LINEAR
        """Whether it may be given sums whose parts are on the ranks."""
        self.bears_nothing = self.is_view or is_written_apart or self.operator in BEARS_NOTHING
        """Whether it may be done where a rank's part is empty: a maximum of nothing fails, on that rank alone."""
        self.can_be_lowered = not (self.is_random or self.is_fused or self.operator in GRADED)
        """Whether it becomes the same calls for operands with the same layout."""
        self.along_batch = self.operator in ALONG_BATCH
        self.apart = _way_apart(self.operator) if self.operator in APART and not reduces_all else None

    def fill(self, use: Use, tensors: Sequence[Any]) -> tuple[list[Any], dict[str, Any]]:
        args = [fill_places(argument, tensors, use.numbers) for argument in self.args]
        return args, {name: fill_places(value, tensors, use.numbers) for name, value in self.kwargs.items()}


def _way_apart(operator: Operator) -> Callable[..., Any]:
    is_loss = "nll_loss" in operator._schema.name
    return functools.partial(_mean_of_items, operator) if is_loss else decomposition_table[operator]


def _mean_of_items(operator: Operator, scores: Any, classes: Any, weight: Any, reduction: int, ignored: int) -> Any:
    """Return a loss of classes, where a mean is the sum of all losses by the sum of all weights."""
    is_mean = reduction == 1
    loss, weights = operator(scores, classes, weight, 2 if is_mean else reduction, ignored)
    if not is_mean:
        return loss, weights
    weights = weights.redistribute(placements=[Replicate()] * len(weights.placements))  # once: gradients need it, too
    return loss / weights, weights


def has_no_way(error: Exception) -> bool:
    """Whether DTensor can never do an operation, rather than not with these placements.

    DTensor finds that out before it does anything. Raises: the error, if it is another one.
    """
    if isinstance(error, NotImplementedError) or "unhashable type" in str(error):  # of its memory: complex numbers
        return True
    if "Sharding propagation failed" not in str(error):
        raise error
    return False


def by_heads(operator: Operator, args: Sequence[Any], kwargs: dict[str, Any]) -> list[Any] | None:
    """Return the arguments of attention laid out as the queries, if these are cut along items and heads at most."""
    query = args[[argument.name for argument in operator._schema.arguments].index("query")]
    if not all(each.is_replicate() or each.is_shard(0) or each.is_shard(1) for each in query.placements):
        return None
    if has_empty_part(query):  # native code divides by the number of items
        return None
    unlike = any(each.shape[:2] != query.shape[:2] for each in args if isinstance(each, DTensor))
    if unlike or kwargs.get("attn_mask") is not None:  # heads share keys, or a mask is for all of them
        return None
    return [each.redistribute(placements=query.placements) if isinstance(each, DTensor) else each for each in args]


def is_misread(operator: object, args: Sequence[Any]) -> bool:
    """Whether DTensor 2.13 does an operation rightly, but not with these arguments."""
    first = args[0] if args else None
    if operator in _LARGEST_OF_EACH:  # there is none where a part is empty
        is_norm = operator is aten._foreach_norm.Scalar and (len(args) < 2 or not math.isinf(args[1]))
        return not is_norm and any(map(has_empty_part, args[0]))
    if not isinstance(first, DTensor):
        return False
    if operator in (aten.view.default, aten._unsafe_view.default):
        return splits_unequally(first, args[1])
    if operator is aten.embedding.default:
        return _has_no_mask(first.placements, args[1])
    if operator is aten.embedding_dense_backward.default:  # it counts how often a row is used in a part
        return bool(args[4])
    if operator is aten.histc.default:  # equal ends stand for those of the values, which it takes for those of a part
        return len(args) > 3 and args[2] == args[3]
    return operator in _ANY and first.dtype is torch.uint8  # what is true is 1, and of two parts 2


def check_rows(table: DTensor, indices: DTensor) -> None:
    """Raise an IndexError, as torch does, for a row that a table in parts lacks: masks would make zeros of it."""
    local = indices.to_local()
    if local.is_cpu and local.numel() and any(each.is_shard(0) for each in table.placements):
        least, most = local.aminmax()
        if least < 0 or most >= table.shape[0]:
            raise IndexError("index out of range in self")


def _has_no_mask(table: Sequence[Placement], indices: DTensor) -> bool:
    """Whether DTensor lacks a mask for rows that are elsewhere: it has one for an axis that cuts rows alone."""
    rows = sum(each.is_shard(0) for each in table)
    is_cut = not all(each.is_replicate() for each in indices.placements)
    is_cut_else = any(each.is_shard() and not each.is_shard(0) for each in table)
    return rows > 1 or (rows == 1 and (has_empty_part(indices) or (is_cut and is_cut_else)))


_LARGEST_OF_EACH = (aten._foreach_max.default, aten._foreach_norm.Scalar)
_ANY = (aten.any.default, aten.any.dim, aten.any.dims)


def with_nan(made: Any) -> Any:
    """Return the results with the extremes of all parts reduced here: collectives would lose a NaN."""
    if isinstance(made, (list, tuple)):
        return [with_nan(each) for each in made]
    if not isinstance(made, DTensor) or not made.dtype.is_floating_point:
        return made
    local, placements = made._local_tensor, list(made.placements)
    for axis, placement in enumerate(placements):
        if (reduction := getattr(placement, "reduce_op", "")) in ("max", "min"):  # of partial ones
            group = made.device_mesh.get_group(axis)
            parts = functional_collectives.all_gather_into_tensor(
                local.contiguous()[None], group.size(), group.group_name
            )
            parts = functional_collectives.wait_tensor(parts)
            local = parts.amax(0) if reduction == "max" else parts.amin(0)
            placements[axis] = Replicate()
    if local is made._local_tensor:
        return made
    return from_part(local, made.device_mesh, placements, made.shape, made.stride())


_AUTOGRAD = DispatchKey.AutogradFunctionality
_KERNELS = torch.library.Library("aten", "IMPL")  # type: ignore[no-untyped-call]


@functools.cache
def register_attention() -> None:
    """Have tensors of GPUs take the functions below for attention."""
    _KERNELS.impl("_scaled_dot_product_flash_attention_for_cpu", _attend_on_cuda, "CUDA")  # type: ignore[no-untyped-call]
    _KERNELS.impl("_scaled_dot_product_flash_attention_for_cpu_backward", _attend_back_on_cuda, "CUDA")  # type: ignore[no-untyped-call]


def _attend_on_cuda(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    *,
    attn_mask: torch.Tensor | None = None,
    scale: float | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    made = scaled_dot_product_attention(query, key, value, attn_mask, dropout_p, is_causal, scale=scale)
    batch, heads, length, _ = query.shape
    kept = torch.float64 if query.dtype == torch.float64 else torch.float32
    return made, query.new_zeros((batch, length, heads), dtype=kept).transpose(1, 2)


def _attend_back_on_cuda(
    grad: torch.Tensor,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    out: torch.Tensor,
    logsumexp: torch.Tensor,
    dropout_p: float,
    is_causal: bool,
    *,
    attn_mask: torch.Tensor | None = None,
    scale: float | None = None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    # torch has called this below autograd, where nothing is noted for a backward pass, whatever enable_grad says.
    with SetExcludeDispatchKeyGuard(_AUTOGRAD, False), torch.enable_grad():
        q, k, v = (each.detach().requires_grad_() for each in (query, key, value))
        made = scaled_dot_product_attention(q, k, v, attn_mask, dropout_p, is_causal, scale=scale)
        of_query, of_key, of_value = torch.autograd.grad(made, (q, k, v), grad)
    return of_query, of_key, of_value
