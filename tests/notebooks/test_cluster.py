"""The notebook of two hosts by ssh, executed headless: it learns, though one of them is lost."""

from __future__ import annotations

from typing import Any

import pytest
from engine_clusters import ssh_hosts
from executed_notebooks import execute, kinds_that_differ, text_of

pytestmark = [pytest.mark.slow, pytest.mark.timeout(400)]


@pytest.fixture(scope="module")
def cells(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    with ssh_hosts():
        pass  # else skipped; the notebook starts its own
    return execute("cluster.ipynb", tmp_path_factory.mktemp("cluster"))[1]


@pytest.mark.parametrize(
    ("cell", "said"),
    [
        ("spawn-code", ["hosts=2, gpus=2, cpu, gloo", "(4 ranks on 2 hosts)"]),
        ("where", ["[0] rank 0 is at ", "[3] rank 3 is at "]),
        ("lost", ["on nodeB ended", "its ssh connection has ended", "repair: %mesh heal"]),
        ("heal-code", ["host nodeB started again, ranks 2,3 started again", "ran there again"]),
        ("accuracy", ["accuracy on 397 held-out digits: "]),
        ("stop-code", ['mesh "main" stopped']),
    ],
)
def test_what_each_cell_says(cells: dict[str, Any], cell: str, said: list[str]) -> None:
    for words in said:
        assert words in text_of(cells[cell])


def test_all_learned_together(cells: dict[str, Any]) -> None:
    accuracy = float(text_of(cells["accuracy"]).split("held-out digits: ")[1].split("%")[0])
    assert accuracy > 95


def test_the_outputs_in_git_are_of_these_kinds(cells: dict[str, Any]) -> None:
    differ = kinds_that_differ("cluster.ipynb", cells)
    assert not [line for line in differ if not line.startswith(("cut:", "lost:"))]  # there a busy host is told of too
