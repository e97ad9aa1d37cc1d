"""The notebook from a script of torchrun and back, executed headless: the same losses on each way."""

from __future__ import annotations

from typing import Any

import pytest
from executed_notebooks import checks_of, text_of

pytestmark = [pytest.mark.slow, pytest.mark.timeout(340)]

SAID = {
    "diff": ["4 of 4 parts equal on ranks 0-3"],
    "eval": ["[0] 0.", "[3] 0."],
    "export": ["run it: torchrun --nproc-per-node 4 trained.py", "verified: "],
}
cells, test_what_each_cell_says, test_outputs_in_git = checks_of("torchrun.ipynb", SAID)


def test_the_script_trains_on_the_mesh_as_by_torchrun(cells: dict[str, Any]) -> None:
    by_torchrun, on_mesh = text_of(cells["torchrun"]), text_of(cells["run"])
    assert by_torchrun.startswith("step 99: loss 0.") and by_torchrun.strip() in on_mesh


def test_the_exported_script_has_the_losses_of_the_cells(cells: dict[str, Any]) -> None:
    again, told = text_of(cells["torchrun-again"]), text_of(cells["change"]).removeprefix("[0] ").strip()
    assert told.startswith("step 199: loss 0.0") and told in again
