"""The notebook that trains a transformer, executed headless: it learned as in one process, though a rank was killed."""

from __future__ import annotations

from typing import Any

import pytest
from executed_notebooks import execute, kinds_that_differ, text_of

pytestmark = [pytest.mark.nightly, pytest.mark.timeout(400)]


@pytest.fixture(scope="module")
def cells(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    return execute("train_transformer.ipynb", tmp_path_factory.mktemp("transformer"))[1]


@pytest.mark.parametrize(
    ("cell", "said"),
    [
        ("plan", ["blocks.0.q.weight", "Replicate(), Shard(dim=0)", "bytes per rank"]),
        ("train", ["batch 15: WorkerLost", "rank 3 started again", "the loss fell from 4."]),
        ("alone", ["30 losses equal those of one process"]),
        ("write", ["The statement "]),
    ],
)
def test_what_each_cell_says(cells: dict[str, Any], cell: str, said: list[str]) -> None:
    for words in said:
        assert words in text_of(cells[cell])


def test_the_outputs_in_git_are_of_these_kinds(cells: dict[str, Any]) -> None:
    assert not kinds_that_differ("train_transformer.ipynb", cells)
