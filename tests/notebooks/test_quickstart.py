"""The quickstart, executed as ``make demo`` executes it: headless, from a clean Meshbook kernel."""

from __future__ import annotations

from typing import Any

import pytest
from executed_notebooks import execute, kinds_that_differ, text_of

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def demo(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, dict[str, Any]]:
    """What the demo printed, and its executed cells by id."""
    return execute("quickstart.ipynb", tmp_path_factory.mktemp("demo"))


def figures_of(cell: Any) -> int:
    shown = [output.get("data", {}) for output in cell["outputs"]]
    return sum(1 if "image/png" in data else str(data.get("text/html", "")).count("<img src=") for data in shown)


def test_every_cell_ran_and_the_summary_says_so(demo: tuple[str, dict[str, Any]]) -> None:
    printed, cells = demo
    code = [cell for cell in cells.values() if cell["cell_type"] == "code"]
    assert all(cell["execution_count"] for cell in code)
    assert f"quickstart.ipynb passed: {len(code)} cells" in printed.splitlines()[-1]


def test_ranks_say_where_they_are(demo: tuple[str, dict[str, Any]]) -> None:
    text = text_of(demo[1]["where-code"])
    assert "[0-3] 4 ranks, joined by gloo" in text
    for rank in range(4):
        assert f"[{rank}] rank {rank} is at " in text


def test_targets_run_on_their_ranks_only(demo: tuple[str, dict[str, Any]]) -> None:
    assert "[1,3] only the odd ranks" in text_of(demo[1]["target-code"])
    in_front = text_of(demo[1]["slice-use"])
    assert "rank 1 is in front" in in_front
    assert "rank 2" not in in_front
    second_column = text_of(demo[1]["split-use"])
    assert "[3] rank 3 is at row 1, column 1" in second_column
    assert "[2]" not in second_column


def test_plots_come_from_ranks_and_notebook(demo: tuple[str, dict[str, Any]]) -> None:
    assert figures_of(demo[1]["plots-code"]) == 2
    assert figures_of(demo[1]["loss-plot"]) == 1


def test_training_reads_held_out_digits_right(demo: tuple[str, dict[str, Any]]) -> None:
    text = text_of(demo[1]["accuracy-code"])
    accuracy = float(text.split("held-out digits: ")[1].split("%")[0])
    assert accuracy > 95


def test_the_outputs_in_git_are_of_these_kinds(demo: tuple[str, dict[str, Any]]) -> None:
    assert not kinds_that_differ("quickstart.ipynb", demo[1])
