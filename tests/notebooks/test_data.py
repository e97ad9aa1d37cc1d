"""The notebook about Polars and DuckDB, executed headless: shards that add up to the whole, and a model that learns."""

from __future__ import annotations

import re
from typing import Any

import pytest
from executed_notebooks import checks_of, text_of

pytestmark = [pytest.mark.slow, pytest.mark.timeout(340)]

SAID = {
    "shard": ["[0] 58,905 trips of 01, 05, 09", "[3] 60,922 trips of 04, 08, 12"],
    "whole": ["60479", "60532"],
    "tensors": ["241,686 trips in all; 222 batches of 256 for each rank"],
}
cells, test_what_each_cell_says, test_outputs_in_git = checks_of("data.ipynb", SAID)


def test_the_frames_of_the_ranks_are_a_grid(cells: dict[str, Any]) -> None:
    [shown] = cells["duckdb"]["outputs"]
    assert shown["data"]["text/html"].count("<table") == 4


def test_the_model_is_far_better_than_the_mean(cells: dict[str, Any]) -> None:
    learned, mean = map(float, re.findall(r"by (\d+\.\d)", text_of(cells["train"]))[:2])
    assert learned < 0.8 and mean > 7
