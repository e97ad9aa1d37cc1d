"""The notebook about reinforcement learning, executed headless: its reward rises, also past the death of a rank."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import nbformat
import pytest

NOTEBOOKS = Path(__file__).parents[2] / "notebooks"
RUN_LIMIT_S = 200
"""It trains: 20 s on two quiet cores, several times that beside other tests."""

pytestmark = [pytest.mark.slow, pytest.mark.timeout(RUN_LIMIT_S + 40)]


@pytest.fixture(scope="module")
def cells(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """The executed cells by id; what the notebook asserts of itself held."""
    executed = tmp_path_factory.mktemp("rl") / "rl.ipynb"
    result = subprocess.run(
        [sys.executable, str(NOTEBOOKS / "run.py"), str(NOTEBOOKS / "rl.ipynb"), "--save", str(executed)],
        capture_output=True,
        text=True,
        timeout=RUN_LIMIT_S,
    )
    assert result.returncode == 0, result.stdout + result.stderr
    return {cell["id"]: cell for cell in nbformat.read(executed, as_version=4).cells}


def text_of(cell: Any) -> str:
    """All text of a cell's outputs."""
    return "\n".join(output.get("text") or output.get("data", {}).get("text/plain", "") for output in cell["outputs"])


def test_the_reward_rises(cells: dict[str, Any]) -> None:
    told = text_of(cells["result"])
    first, last = told.partition(";")[0].removeprefix("reward ").split(" -> ")
    assert float(last) > float(first) + 0.2


def test_training_goes_on_past_the_death_of_a_generator(cells: dict[str, Any]) -> None:
    told = text_of(cells["second-half"])
    assert "generator 1 was killed by SIGKILL" in told
    assert told.index("killed by SIGKILL") < told.index("step 100: reward")


def test_what_the_model_writes_is_shown_before_and_after(cells: dict[str, Any]) -> None:
    assert "written with the weights of step 0:" in text_of(cells["generator"])
    assert "the mean and|" in text_of(cells["read-back"])


def test_the_plot_is_in_the_notebook(cells: dict[str, Any]) -> None:
    assert any("image/png" in output.get("data", {}) for output in cells["plot"]["outputs"])
