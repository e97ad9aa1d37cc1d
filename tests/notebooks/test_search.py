"""The notebook about a search over slices, executed headless: the worst of four jobs is stopped for another one."""

from __future__ import annotations

import re
from typing import Any

import pytest
from executed_notebooks import checks_of, text_of

pytestmark = [pytest.mark.slow, pytest.mark.timeout(340)]

SAID = {
    "early": ["accuracy", "(0-3: 0."],
    "cancel": ["job 4 cancelled", "rank 3 stopped"],
    "another": ["job 5 runs on rank 3"],
    "wait": [f"job {number} done after" for number in (1, 2, 3, 5)],
    "stop": ["the best of five: lr=0.2, width=64"],
}
cells, test_what_each_cell_says, test_outputs_in_git = checks_of("search.ipynb", SAID)


def test_each_job_is_told_once(cells: dict[str, Any]) -> None:
    assert text_of(cells["wait"]).count("done after") == 4


def test_the_last_picture_has_the_curves_of_the_trials_that_went_on(cells: dict[str, Any]) -> None:
    shown = text_of(cells["table"])
    assert "(0-3: 0.88" in shown and "at step 39" in shown
    accuracies = [float(found) for found in re.findall(r"┆ 40 +┆ (0\.\d+)", shown)]
    assert accuracies == pytest.approx([0.923, 0.883, 0.925, 0.933], abs=0.01)
