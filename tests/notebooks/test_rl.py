"""The notebook about reinforcement learning, executed headless: its reward rises, also past the death of a rank."""

from __future__ import annotations

from typing import Any

import pytest
from executed_notebooks import execute, kinds_that_differ, text_of

pytestmark = [
    pytest.mark.nightly,
    pytest.mark.timeout(340),
]  # it trains: 20 s on two quiet cores, several times that beside others


@pytest.fixture(scope="module")
def cells(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """The executed cells by id; what the notebook asserts of itself held."""
    return execute("rl.ipynb", tmp_path_factory.mktemp("rl"))[1]


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


def test_the_outputs_in_git_are_of_these_kinds(cells: dict[str, Any]) -> None:
    assert not kinds_that_differ("rl.ipynb", cells)
