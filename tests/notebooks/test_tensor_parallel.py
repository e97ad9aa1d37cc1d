"""The notebook about tensor parallelism, executed headless: what a step sends, its losses, and a model that sorts."""

from __future__ import annotations

import re
from typing import Any

import pytest
from executed_notebooks import checks_of, text_of

pytestmark = [pytest.mark.slow, pytest.mark.timeout(340)]

SAID = {
    "plan": ["[0,2] DTensor (256, 64)", "[1,3] DTensor (256, 64)"],
    "count": ["[0-3] '4 forward, 10 backward'"],
    "better": ["[0-3] '4 forward, 4 backward'"],
    "shard": ["attention.wo.weight      (64, 64)   here (32, 32)"],
    "alone": ["30 losses are those of the four ranks"],
    "sorted": ["[0-3] [1, 1, 2, 3, 3, 4, 5, 5, 5, 6, 8, 9]"],
}
cells, test_what_each_cell_says, test_outputs_in_git = checks_of("tensor_parallel.ipynb", SAID)


def test_it_learns_to_sort(cells: dict[str, Any]) -> None:
    first, last = map(float, re.findall(r"\] loss (\S+) -> (\S+)", text_of(cells["train"]))[0])
    assert first == pytest.approx(2.50, abs=0.02) and last < 0.06
    assert float(text_of(cells["sorted"]).partition("] ")[2].partition("%")[0]) > 98.5
