"""Attention as ranks on a GPU do it, here with the kernels of the CPU: torch calls it below autograd there too."""

from __future__ import annotations

import torch
from torch.nn.functional import scaled_dot_product_attention

from meshbook.tensors.ranks import operator_rules

FOR_CPU = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu


def test_the_gradients_are_those_of_torch_where_autograd_is_off() -> None:
    torch.manual_seed(0)
    tensors = [torch.randn(2, 3, 5, 4, requires_grad=True) for _ in range(3)]
    wanted = torch.autograd.grad(scaled_dot_product_attention(*tensors, is_causal=True).sum(), tensors)
    q, k, v = (each.detach() for each in tensors)
    ones = torch.ones_like(q)
    with torch.no_grad(), torch._C._AutoDispatchBelowAutograd():
        out, kept = operator_rules._attend_on_cuda(q, k, v, is_causal=True)
        got = operator_rules._attend_back_on_cuda(ones, q, k, v, out, kept, 0.0, True)
    assert all(torch.allclose(a, b, atol=1e-6) for a, b in zip(got, wanted, strict=True))
    assert not any(each.requires_grad for each in got)


def test_it_is_made_like_that_of_the_operator() -> None:
    q = torch.randn(2, 3, 5, 4)
    got, wanted = operator_rules._attend_on_cuda(q, q, q), FOR_CPU(q, q, q)
    assert torch.allclose(got[0], wanted[0], atol=1e-6)
    assert [(t.shape, t.stride(), t.dtype) for t in got] == [(t.shape, t.stride(), t.dtype) for t in wanted]
