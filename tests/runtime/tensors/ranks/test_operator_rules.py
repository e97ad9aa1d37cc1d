"""Operators as ranks have them."""

from __future__ import annotations

import torch

from meshbook.tensors.messages.operations import Template, Use
from meshbook.tensors.ranks.operator_rules import CompiledTemplate

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
