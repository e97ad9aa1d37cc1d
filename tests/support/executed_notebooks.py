"""Notebooks of the project, executed as ``make demo`` executes them: headless, from a clean Meshbook kernel."""

from __future__ import annotations

import copy
import re
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import nbformat
import pytest

from notebooks.normalise import Machine, kinds_of, normalise

NOTEBOOKS = Path(__file__).parents[2] / "notebooks"
RUN_LIMIT_S = 300
_COLOUR = re.compile(r"\x1b\[[0-9;]*m")


def execute(name: str, folder: Path) -> tuple[str, dict[str, Any]]:
    """Return the run's print-out, and the executed cells by id; each has passed or was meant to fail."""
    executed = folder / name
    command = [sys.executable, str(NOTEBOOKS / "run.py"), str(NOTEBOOKS / name), "--save", str(executed)]
    result = subprocess.run(command, capture_output=True, text=True, timeout=RUN_LIMIT_S)
    assert result.returncode == 0, result.stdout + result.stderr
    return result.stdout, {cell["id"]: cell for cell in nbformat.read(executed, as_version=4).cells}


def checks_of(
    name: str, said: Mapping[str, Sequence[str]], faults: Sequence[str] = ()
) -> tuple[Callable[..., dict[str, Any]], Callable[..., None], Callable[..., None]]:
    """Return a fixture of the executed cells by id, a test of each cell's words, and one of the outputs in git.

    said: the words that the cells show. faults: cells that are meant to fail.
    """

    @pytest.fixture(scope="module")
    def cells(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
        return execute(name, tmp_path_factory.mktemp("executed"))[1]

    @pytest.mark.parametrize("cell", said)
    def test_each_cell_says_what_it_is_there_for(cells: dict[str, Any], cell: str) -> None:
        text = text_of(cells[cell])
        assert not [words for words in said[cell] if words not in text], text
        assert cell not in faults or any(output["output_type"] == "error" for output in cells[cell]["outputs"])

    def test_the_outputs_in_git_are_of_these_kinds(cells: dict[str, Any]) -> None:
        assert not kinds_that_differ(name, cells)

    return cells, test_each_cell_says_what_it_is_there_for, test_the_outputs_in_git_are_of_these_kinds


def text_of(cell: Any) -> str:
    """All text of a cell's outputs, errors included, without colours; pieces of a stream are put together again."""
    text = ""
    for output in cell["outputs"]:
        if output["output_type"] == "stream":
            text += output["text"]
        else:
            text += (output.get("data", {}).get("text/plain") or "\n".join(output.get("traceback", ()))) + "\n"
    return _COLOUR.sub("", text)


def kinds_that_differ(name: str, cells: Mapping[str, Any]) -> list[str]:
    """Return how the outputs in git of the notebook ``name`` differ in kinds or order from those just computed.

    Times and values may differ, and so may the number of pieces of a stream.
    """
    return differences(nbformat.read(NOTEBOOKS / name, as_version=4), nbformat.v4.new_notebook(cells=[*cells.values()]))


def differences(saved: Any, computed: Any) -> list[str]:
    """Return a line for each code cell whose saved outputs have other kinds or another order than the computed."""
    computed = copy.deepcopy(computed)
    normalise(computed, Machine.here())
    wanted, found = (
        {cell["id"]: kinds_of(cell) for cell in notebook.cells if cell["cell_type"] == "code"}
        for notebook in (saved, computed)
    )
    if [*wanted] != [*found]:
        return [f"saved are the cells {', '.join(wanted)}; computed {', '.join(found)}"]
    return [f"{id}: saved are {wanted[id]}, computed {found[id]}" for id in wanted if wanted[id] != found[id]]
