"""Notebooks of the project, executed as ``make demo`` executes them: headless, from a clean Meshbook kernel."""

from __future__ import annotations

import copy
import re
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import nbformat

from notebooks.normalise import Machine, kinds_of, normalise

NOTEBOOKS = Path(__file__).parents[2] / "notebooks"
RUN_LIMIT_S = 300
_COLOUR = re.compile(r"\x1b\[[0-9;]*m")


def execute(name: str, folder: Path, instead: Mapping[str, str] | None = None) -> tuple[str, dict[str, Any]]:
    """What the run printed, and the executed cells by id; each has passed or was meant to fail.

    instead: other code of some cells, by their ids.
    """
    executed, source = folder / name, NOTEBOOKS / name
    if instead:
        notebook = nbformat.read(source, as_version=4)
        cells = {cell["id"]: cell for cell in notebook.cells}
        for id, code in instead.items():
            cells[id]["source"] = code
        source = folder / f"other-{name}"
        nbformat.write(notebook, source)
    result = subprocess.run(
        [sys.executable, str(NOTEBOOKS / "run.py"), str(source), "--save", str(executed)],
        capture_output=True,
        text=True,
        timeout=RUN_LIMIT_S,
    )
    assert result.returncode == 0, result.stdout + result.stderr
    return result.stdout, {cell["id"]: cell for cell in nbformat.read(executed, as_version=4).cells}


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
