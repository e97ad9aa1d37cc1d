"""The notebook about watching a training, executed headless: peeks at busy ranks, a stopped job, curves, and tables."""

from __future__ import annotations

from typing import Any

import pytest
from executed_notebooks import checks_of

pytestmark = pytest.mark.slow

SAID = {
    "job": ["job 1 runs on ranks 0-3"],
    "wait": ["at that time: ", "cell 2, line"],
    "weights": ["at that time: "],
    "cancel": ["job 1 interrupted: ranks 0-3 stopped, all variables kept"],
    "metrics": ["loss        0-3   299", "accuracy    0-3   299"],
    "diff": ["model (19.2 kB): 4 of 4 parts equal on ranks 0-3"],
    "vars": ["images", "DistributedDataParallel", "equal on 0-3"],
}
cells, test_what_each_cell_says, _ = checks_of("watch.ipynb", SAID)
"""The outputs in git are not compared: an interrupt may find a tensor half reduced, and says so then."""


def test_the_training_shows_its_curves(cells: dict[str, Any]) -> None:
    (shown,) = (output for output in cells["train"]["outputs"] if output["output_type"] == "display_data")
    assert shown["data"]["text/html"].count("<svg") == 2
    assert "loss" in shown["data"]["text/plain"] and "at step 299" in shown["data"]["text/plain"]
