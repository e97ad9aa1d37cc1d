"""The notebook about failures, executed headless: each planted fault is told as the docs say, and the mesh goes on."""

from __future__ import annotations

from typing import Any

import pytest
from executed_notebooks import checks_of, text_of

pytestmark = pytest.mark.slow

SAID = {
    "raise": ["rank 1 raised ValueError: shard 17 is empty", "ranks 0,2,3 were waiting in", "all variables kept"],
    "mismatch": ["ranks 1-3 wait in barrier", "which rank 0 never entered", "took more than 4 s"],
    "kill": ["rank 2 on ", "killed by SIGKILL", "repair: %mesh heal"],
    "heal": ["rank 2 started again, all 4 ranks joined", "setup cell 2 ran there again"],
    "shrink": ["gpus=3", "rank 3 ended"],
    "grow": ["gpus=5", "ranks 3,4 are new"],
    "detach": ["lives on for 15 min"],
    "attach": ['attached to mesh "main": gpus=5'],
    "attach-check": ["[0-4] 64 inputs are still here"],
}
cells, test_what_each_cell_says, test_outputs_in_git = checks_of("failures.ipynb", SAID, ("raise", "mismatch", "kill"))


def test_nobody_who_waited_for_the_dead_is_shown_as_failing(cells: dict[str, Any]) -> None:
    assert "RuntimeError" not in text_of(cells["kill"])
    assert "GroupAborted" not in text_of(cells["raise"])
