"""The notebook about FSDP2, executed headless: a rank holds a quarter, and the losses are those of one process."""

from __future__ import annotations

import re
from typing import Any

import pytest
from executed_notebooks import checks_of, text_of

pytestmark = [pytest.mark.slow, pytest.mark.timeout(340)]

SAID = {
    "shard": ["[3] DTensor (512, 128) float32 cpu [S(0)], this rank's part (128, 128)"],
    "memory": ["parameters      1.22 MB", "AdamW's state   2.45 MB"],
    "alone": ["20 losses are those of the four ranks", "parameters      4.90 MB, 4.0 times as much"],
}
cells, test_what_each_cell_says, test_outputs_in_git = checks_of("fsdp.ipynb", SAID)


def test_the_loss_falls(cells: dict[str, Any]) -> None:
    first, last = map(float, re.findall(r"\] loss (\S+) -> (\S+)", text_of(cells["train"]))[0])
    assert first == pytest.approx(4.75, abs=0.05) and last < 2.75


def test_the_whole_model_has_the_loss_of_its_parts(cells: dict[str, Any]) -> None:
    here, there = map(float, re.findall(r"\d\.\d{4}", text_of(cells["plain"])))
    assert here == pytest.approx(there, abs=2e-4) and here < 2.8
