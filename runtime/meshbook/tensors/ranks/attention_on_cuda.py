"""Attention on a GPU, by the operators that torch has for CPUs: the controller, which has no GPU, takes it apart so.

Forward and backward are torch's own attention, which picks the kernel. What the operator for CPUs keeps for its
backward pass is left empty: the kernels of GPUs keep other things, so the backward pass begins anew. That is right
since torch takes this operator only where there is no dropout.
"""

from __future__ import annotations

import functools

import torch
from torch.nn.functional import scaled_dot_product_attention

from meshbook.torch_internals import DispatchKey, SetExcludeDispatchKeyGuard

_AUTOGRAD = DispatchKey.AutogradFunctionality
_KERNELS = torch.library.Library("aten", "IMPL")  # type: ignore[no-untyped-call]


@functools.cache
def register_attention() -> None:
    """Have tensors of GPUs take these."""
    _KERNELS.impl("_scaled_dot_product_flash_attention_for_cpu", _forward, "CUDA")  # type: ignore[no-untyped-call]
    _KERNELS.impl("_scaled_dot_product_flash_attention_for_cpu_backward", _backward, "CUDA")  # type: ignore[no-untyped-call]


def _forward(
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


def _backward(
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
