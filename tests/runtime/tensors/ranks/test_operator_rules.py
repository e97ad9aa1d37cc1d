"""Operators as ranks have them."""

from __future__ import annotations

import torch
from torch.nn.functional import scaled_dot_product_attention

from meshbook.tensors.messages.operations import Template, Use
from meshbook.tensors.ranks.operator_rules import CompiledTemplate, _attend_back_on_cuda, _attend_on_cuda

USE = Use(0, [], [], [])


def device_of(operator: str) -> torch.device:
    """Return where ranks on a GPU make what the controller, which has none, asks for on the CPU."""
    named = {"device": torch.device("cpu")}
    filled: torch.device = CompiledTemplate(Template(0, operator, [[2]], named), "cuda").fill(USE, [])[1]["device"]
    return filled


def test_tensors_are_made_on_the_device_of_the_ranks() -> None:
    assert device_of("aten.ones.default").type == "cuda"


def test_numbers_are_drawn_on_the_cpu_so_that_they_are_the_same_everywhere() -> None:
    assert device_of("aten.randn.default").type == "cpu"


FOR_CPU = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu


def test_attention_on_cuda_has_the_gradients_of_torch_below_autograd() -> None:
    torch.manual_seed(0)
    tensors = [torch.randn(2, 3, 5, 4, requires_grad=True) for _ in range(3)]
    wanted = torch.autograd.grad(scaled_dot_product_attention(*tensors, is_causal=True).sum(), tensors)
    q, k, v = (each.detach() for each in tensors)
    ones = torch.ones_like(q)
    with torch.no_grad(), torch._C._AutoDispatchBelowAutograd():
        out, kept = _attend_on_cuda(q, k, v, is_causal=True)
        got = _attend_back_on_cuda(ones, q, k, v, out, kept, 0.0, True)
    assert all(torch.allclose(a, b, atol=1e-6) for a, b in zip(got, wanted, strict=True))
    assert not any(each.requires_grad for each in got)


def test_attention_on_cuda_is_made_like_that_of_the_operator() -> None:
    q = torch.randn(2, 3, 5, 4)
    got, wanted = _attend_on_cuda(q, q, q), FOR_CPU(q, q, q)
    assert torch.allclose(got[0], wanted[0], atol=1e-6)
    assert [(t.shape, t.stride(), t.dtype) for t in got] == [(t.shape, t.stride(), t.dtype) for t in wanted]
