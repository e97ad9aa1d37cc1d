"""The notebook about pipelines, executed headless: the order of two schedules, and losses of one process."""

from __future__ import annotations

from typing import Any

import pytest
from executed_notebooks import checks_of, text_of

pytestmark = [pytest.mark.slow, pytest.mark.timeout(340)]

SAID = {
    "whole": ["406,922 parameters"],
    "schedules": [
        "ScheduleGPipe FFFFFFFFBBBBBBBB  holds at most 8",
        "[0] Schedule1F1B  FFFFBFBFBFBFBBBB  holds at most 4",
        "[3] Schedule1F1B  FBFBFBFBFBFBFBFB  holds at most 1",
    ],
    "alone": ["40 losses are those of the pipeline"],
}
cells, test_what_each_cell_says, test_outputs_in_git = checks_of("pipeline.ipynb", SAID)


def test_the_stages_have_learned_together(cells: dict[str, Any]) -> None:
    assert float(text_of(cells["alone"]).rpartition("the last is ")[2]) < 0.1
    assert float(text_of(cells["join"]).partition("% of 517 digits")[0].rpartition("\n")[2]) > 88
