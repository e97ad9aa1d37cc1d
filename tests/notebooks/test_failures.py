"""The notebook about failures, executed headless: each planted fault is told as the docs say, and the mesh goes on."""

from __future__ import annotations

from typing import Any

import pytest
from executed_notebooks import execute, kinds_that_differ, text_of

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def cells(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """The executed cells by id."""
    return execute("failures.ipynb", tmp_path_factory.mktemp("failures"))[1]


@pytest.mark.parametrize(
    ("cell", "said"),
    [
        ("raise", ["rank 1 raised ValueError: shard 17 is empty", "ranks 0,2,3 were waiting in", "all variables kept"]),
        ("mismatch", ["ranks 1-3 wait in barrier", "which rank 0 never entered", "took more than 4 s"]),
        ("kill", ["rank 2 on ", "killed by SIGKILL", "repair: %mesh heal"]),
        ("heal", ["rank 2 started again, all 4 ranks joined", "setup cell 2 ran there again"]),
        ("shrink", ["gpus=3", "rank 3 ended"]),
        ("grow", ["gpus=5", "ranks 3,4 are new"]),
        ("detach", ["lives on for 15 min"]),
        ("attach", ['attached to mesh "main": gpus=5']),
        ("attach-check", ["[0-4] 64 inputs are still here"]),
    ],
)
def test_each_fault_is_told_and_repaired(cells: dict[str, Any], cell: str, said: list[str]) -> None:
    text = text_of(cells[cell])
    for words in said:
        assert words in text


@pytest.mark.parametrize("cell", ["raise", "mismatch", "kill"])
def test_a_planted_fault_fails_its_cell(cells: dict[str, Any], cell: str) -> None:
    assert any(output["output_type"] == "error" for output in cells[cell]["outputs"])


def test_nobody_who_waited_for_the_dead_is_shown_as_failing(cells: dict[str, Any]) -> None:
    assert "RuntimeError" not in text_of(cells["kill"])
    assert "GroupAborted" not in text_of(cells["raise"])


def test_the_outputs_in_git_are_of_these_kinds(cells: dict[str, Any]) -> None:
    assert not kinds_that_differ("failures.ipynb", cells)
