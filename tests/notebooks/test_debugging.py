"""The notebook about debugging, executed with somebody who types at its prompts: each planted fault is found."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import nbformat
import pytest

NOTEBOOKS = Path(__file__).parents[2] / "notebooks"
RUN_LIMIT_S = 110


@pytest.fixture(scope="module")
def cells(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """The executed cells by id; every cell has passed or was meant to fail."""
    executed = tmp_path_factory.mktemp("debugging") / "debugging.ipynb"
    result = subprocess.run(
        [sys.executable, str(NOTEBOOKS / "run.py"), str(NOTEBOOKS / "debugging.ipynb"), "--save", str(executed)],
        capture_output=True,
        text=True,
        timeout=RUN_LIMIT_S,
    )
    assert result.returncode == 0, result.stdout + result.stderr
    return {cell["id"]: cell for cell in nbformat.read(executed, as_version=4).cells}


def text_of(cell: Any) -> str:
    """All text of a cell's outputs, errors included."""
    return "\n".join(
        output.get("text") or output.get("data", {}).get("text/plain") or "\n".join(output.get("traceback", ()))
        for output in cell["outputs"]
    )


@pytest.mark.parametrize(
    ("cell", "said"),
    [
        ("nan-run", ["[0-7] epoch 2: weights nan"]),
        ("nan-eval", ["[5] True"]),
        ("nan-found", ["the bad shard is on rank [5]"]),
        ("nan-pdb", ["rank 5 stopped at cell ", "(Pdb) ranks", "<- this prompt", "tensor([[17,  3]])"]),
        ("nan-raise", ["rank 5 raised FloatingPointError: loss is nan", "ranks 0-4,6,7 were waiting in"]),
        ("errors", ["[5]  cell ", "FloatingPointError: loss is nan"]),
        ("postmortem", ["rank 5 post-mortem of FloatingPointError", "[5] [17]", "torch.Size([224, 64])"]),
        ("hang", ["rank 6 is in barrier (cell ", "where ranks 0-5,7 are in all_reduce", "took more than 5 s"]),
        ("stacks", ["rank 6 is in barrier", "[0-5,7] waiting in all_reduce", "dist.all_reduce(right)"]),
        ("hang-found", ["the odd one is rank 6"]),
        ("hang-cancel", ["job 1 interrupted: ranks 0-7 stopped"]),
        ("hang-mended", ["right, on all ranks"]),
        ("time", ["(slowest rank 3: ", "of own work", "waiting in collectives"]),
        ("profile-run", ["waiting in collectives", "rank 3 least: ", "Python, no operation", "ui.perfetto.dev"]),
        ("profile-check", ["most often waited for: rank 3"]),
        ("follow", ["following rank 3: for 1 s", "not in the cache, decoding 225 images"]),
        ("grep", ["step 14: not in the cache"]),
    ],
)
def test_each_fault_is_found(cells: dict[str, Any], cell: str, said: list[str]) -> None:
    text = text_of(cells[cell])
    for words in said:
        assert words in text


@pytest.mark.parametrize("cell", ["nan-raise", "hang"])
def test_a_planted_fault_fails_its_cell(cells: dict[str, Any], cell: str) -> None:
    assert any(output["output_type"] == "error" for output in cells[cell]["outputs"])


def test_the_times_are_a_chart_in_the_notebook(cells: dict[str, Any]) -> None:
    (chart,) = [output["data"] for output in cells["time"]["outputs"] if "data" in output]
    assert "rank 3" in chart["text/html"] and "slowest" in chart["text/plain"]
