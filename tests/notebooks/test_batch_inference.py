"""The notebook about batch inference, executed headless: balanced loads, and every answer though a rank is killed."""

from __future__ import annotations

import re
from typing import Any

import pytest
from executed_notebooks import checks_of, text_of

pytestmark = [pytest.mark.slow, pytest.mark.timeout(340)]

SAID = {
    "choose": ["90 batches in "],
    "kill": ["rank 1 was lost with batch ", "all 1797 digits are there"],
    "heal": ["rank 1 started again", "all 1797 digits are there, from four actors"],
}
cells, test_what_each_cell_says, test_outputs_in_git = checks_of("batch_inference.ipynb", SAID)


def test_the_slow_rank_gets_fewer_batches(cells: dict[str, Any]) -> None:
    rows = re.findall(r"\[([\d,-]+)\] +(\d+)$", text_of(cells["balanced"]), re.MULTILINE)
    counts = {ranks: int(count) for ranks, count in rows}
    assert counts["3"] < 0.6 * min(count for ranks, count in counts.items() if ranks != "3")
