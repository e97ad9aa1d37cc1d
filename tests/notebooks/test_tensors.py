"""The notebook about tensors, executed headless: what it asserts of itself held, and a killed rank was healed."""

from __future__ import annotations

from typing import Any

import pytest
from executed_notebooks import execute, kinds_that_differ, text_of

pytestmark = [pytest.mark.slow, pytest.mark.timeout(340)]


@pytest.fixture(scope="module")
def cells(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    return execute("tensors.ipynb", tmp_path_factory.mktemp("tensors"))[1]


@pytest.mark.parametrize(
    ("cell", "said"),
    [
        ("distribute", ["MeshTensor(shape=(64, 32)", "placements=(Shard(dim=0), Replicate())", "mean "]),
        ("seen-here", ["[0.0, 10.0, 20.0, 30.0, 40.0, 50.0, 60.0, 70.0]"]),
        ("from-ranks", ["48.0"]),
        ("resilient", ["batch 2: WorkerLost", "rank 3 started again", "the same losses as in one process"]),
    ],
)
def test_what_each_cell_says(cells: dict[str, Any], cell: str, said: list[str]) -> None:
    for words in said:
        assert words in text_of(cells[cell])


def test_the_outputs_in_git_are_of_these_kinds(cells: dict[str, Any]) -> None:
    assert not kinds_that_differ("tensors.ipynb", cells)
