"""Operators of torch that are met before torch takes them apart, since the smaller operators would not suit a mesh.

Some read the memory of tensors, some make tensors of this process to write to, and some ask for values that they could
do without. They are made of other operators here; autograd then goes by these.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.nn import functional

from meshbook.errors import UsageError
from meshbook.tensors.handles.tensor_values import TensorOnRanks
from meshbook.tensors.messages.operations import ONE_HOT
from meshbook.torch_internals import DispatchKey, Operator

aten = torch.ops.aten

_OVERRIDES = torch.library.Library("aten", "IMPL")  # type: ignore[no-untyped-call]


def meet_early_operators() -> None:
    """Have torch call the functions below for tensors on a mesh; others pass as if nothing stood here."""
    for operator, function in _FUNCTIONS.items():
        # the one key at which a subclass can be met so early, and at which other tensors are not
        _OVERRIDES.impl(operator, _for_mesh_tensors(operator, function), "PythonTLSSnapshot", with_keyset=True)  # type: ignore[no-untyped-call]


def _for_mesh_tensors(operator: Operator, function: Callable[..., Any]) -> Callable[..., Any]:
    def meet(keys: Any, *args: Any, **kwargs: Any) -> Any:
        on_mesh = any(isinstance(each, TensorOnRanks) for each in (*args, *kwargs.values()))
        made = function(*args, **kwargs) if on_mesh else NotImplemented
        if made is not NotImplemented:
            return made
        return operator.redispatch(keys.remove(DispatchKey.PythonTLSSnapshot), *args, **kwargs)

    return meet


def _one_hot(indices: torch.Tensor, num_classes: int = -1) -> torch.Tensor:
    """Use the operation of our own, which finds wrong indices on the ranks."""
    if num_classes == -1 and indices.numel():
        num_classes = max(int(indices.max().item()) + 1, 1)  # of negative ones the ranks tell
    made: torch.Tensor = ONE_HOT(indices, num_classes)
    return made


def _tensor_split(tensor: torch.Tensor, indices: torch.Tensor, dim: int = 0) -> Any:
    """Fetch the places to split at, where a mesh tensor has them."""
    return tensor.tensor_split(indices.tolist(), dim) if isinstance(indices, TensorOnRanks) else NotImplemented


def _pool_2d(x: torch.Tensor, size: Any) -> Any:
    """Pool to one element per channel, for which torch asks for places in memory if channels come last."""
    return x.mean((-1, -2), keepdim=True) if [*size] == [1, 1] else NotImplemented


# ---- sequences of unequal lengths: how they lie depends on the lengths alone, which are numbers ----------------------


def _pack(padded: torch.Tensor, lengths: torch.Tensor, batch_first: bool) -> tuple[torch.Tensor, torch.Tensor]:
    """Pack numbers of places, and take rows by them; sizes of batches stay here, where recurrent layers read them."""
    lengths = _here(lengths)
    places = torch.arange(padded.shape[0] * padded.shape[1], device="cpu").view(*padded.shape[:2], 1)
    packed, batch_sizes = aten._pack_padded_sequence.default(places, lengths, batch_first)
    return padded.flatten(0, 1).index_select(0, packed.flatten()), batch_sizes


def _pad(
    packed: torch.Tensor, batch_sizes: torch.Tensor, batch_first: bool, padding: float, total_length: int
) -> tuple[torch.Tensor, torch.Tensor]:
    places = torch.arange(1, packed.shape[0] + 1, device="cpu")[:, None]  # the first is that of the padding
    padded, lengths = aten._pad_packed_sequence.default(places, _here(batch_sizes), batch_first, 0, total_length)
    rows = torch.cat([packed.new_full((1, *packed.shape[1:]), padding), packed])
    return rows.index_select(0, padded.flatten()).view(*padded.shape[:2], *packed.shape[1:]), lengths


def _here(tensor: torch.Tensor) -> torch.Tensor:
    return tensor._whole() if isinstance(tensor, TensorOnRanks) else tensor


# ---- operators whose checks come later, when nobody would learn of an error ------------------------------------------


def _checked(operator: Callable[..., Any], results: int | slice) -> Callable[..., Any]:
    """Use the variant that checks by itself: the error is then one of that operation, and told as any other."""
    return lambda *args, **kwargs: operator(*args, **kwargs, check_errors=True)[results]


def _check(info: torch.Tensor, operator: str, *, is_matrix: bool) -> None:
    """Fetch the numbers of the matrices that failed, for operators without such a variant."""
    aten._linalg_check_errors.default(_here(info), operator, is_matrix=is_matrix)


# ---- what torch does at once where no gradients are wanted --------------------------------------------------------


def _attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    embed_dim: int,
    heads: int,
    qkv_weight: torch.Tensor,
    qkv_bias: torch.Tensor,
    proj_weight: torch.Tensor,
    proj_bias: torch.Tensor,
    mask: torch.Tensor | None = None,
    need_weights: bool = True,
    average_attn_weights: bool = True,
    mask_type: int | None = None,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Compute multi-head attention as torch's own function does.

    mask_type: 0 if the mask covers pairs of places, 1 if it covers padded keys, 2 if it covers both for each head.
    """
    out, weights = functional.multi_head_attention_forward(
        query.transpose(0, 1), key.transpose(0, 1), value.transpose(0, 1),
        embed_dim, heads, qkv_weight, qkv_bias, None, None, False, 0.0, proj_weight, proj_bias, training=False,
        key_padding_mask=mask if mask_type == 1 else None,
        need_weights=need_weights,
        attn_mask=None if mask is None or mask_type == 1 else mask.flatten(0, 1) if mask.dim() == 4 else mask,
        average_attn_weights=average_attn_weights,
    )  # fmt: skip
    return out.transpose(0, 1), weights


def _encoder_layer(
    x: torch.Tensor,
    embed_dim: int,
    heads: int,
    qkv_weight: torch.Tensor,
    qkv_bias: torch.Tensor,
    proj_weight: torch.Tensor,
    proj_bias: torch.Tensor,
    use_gelu: bool,
    norm_first: bool,
    eps: float,
    *weights: Any,
) -> torch.Tensor:
    """weights: of both norms and of both linear layers, each with its bias, then a mask and its type."""
    *layers, mask, mask_type = (*weights, None, None)[:10]
    if (padding := getattr(x, "_padding", None)) is not None:
        mask, mask_type = padding, 1
    norms, first, second = (layers[:2], layers[2:4]), layers[4:6], layers[6:]

    def attend(x: torch.Tensor) -> torch.Tensor:
        given = (embed_dim, heads, qkv_weight, qkv_bias, proj_weight, proj_bias, mask, False, True, mask_type)
        return _attention(x, x, x, *given)[0]

    def feed(x: torch.Tensor) -> torch.Tensor:
        inner = functional.linear(x, *first)
        return functional.linear(functional.gelu(inner) if use_gelu else functional.relu(inner), *second)

    for (weight, bias), layer in zip(norms, (attend, feed), strict=True):
        if norm_first:
            x = x + layer(functional.layer_norm(x, (embed_dim,), weight, bias, eps))
        else:
            x = functional.layer_norm(x + layer(x), (embed_dim,), weight, bias, eps)
    return _padded(x, padding)


def _is_left_aligned(x: torch.Tensor, mask: torch.Tensor) -> bool:
    return not bool((mask.long().diff(dim=1) > 0).any())


def _nested(x: torch.Tensor, mask: torch.Tensor, mask_check: bool = True) -> torch.Tensor:
    """Note the padding of a mesh tensor, which cannot be nested, for layers of encoders and for `_without_padding`."""
    return _padded(x.clone(), mask.logical_not())


def _padded(x: torch.Tensor, padding: torch.Tensor | None) -> torch.Tensor:
    if padding is not None:
        x._padding = padding  # type: ignore[attr-defined]
    return x


def _without_padding(x: torch.Tensor, value: float, size: Any = None) -> torch.Tensor:
    """Raises: UsageError for a tensor that is not nested."""
    if (padding := getattr(x, "_padding", None)) is None:
        raise UsageError("to_padded_tensor is for nested tensors, which a mesh tensor cannot be")
    return x.masked_fill(padding[..., None], value)


_FUNCTIONS: dict[Any, Callable[..., Any]] = {
    aten.linalg_cholesky.default: _checked(aten.linalg_cholesky_ex, 0),
    aten.linalg_inv.default: _checked(aten.linalg_inv_ex, 0),
    aten.inverse.default: _checked(aten.linalg_inv_ex, 0),
    aten.linalg_solve.default: _checked(aten.linalg_solve_ex, 0),
    aten.linalg_lu_factor.default: _checked(aten.linalg_lu_factor_ex, slice(2)),
    aten._linalg_check_errors.default: _check,
    aten.one_hot.default: _one_hot,
    aten.tensor_split.tensor_indices_or_sections: _tensor_split,
    aten.adaptive_avg_pool2d.default: _pool_2d,
    aten._pack_padded_sequence.default: _pack,
    aten._pad_packed_sequence.default: _pad,
    aten._native_multi_head_attention.default: _attention,
    aten._transformer_encoder_layer_fwd.default: _encoder_layer,
    aten._nested_tensor_from_mask_left_aligned.default: _is_left_aligned,
    aten._nested_tensor_from_mask.default: _nested,
    aten.to_padded_tensor.default: _without_padding,
}
