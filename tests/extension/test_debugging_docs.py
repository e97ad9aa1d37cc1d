"""docs/debugging.md: its commands are understood, and its outputs are those of the notebook."""

from __future__ import annotations

import json
import re
from pathlib import Path

from meshbook_extension.cells.run import MESH_CELL
from meshbook_extension.commands import COMMANDS, load_all
from meshbook_extension.notebook.grammar import parse

ROOT = Path(__file__).parents[2]
TEXT = (ROOT / "docs" / "debugging.md").read_text()
NOTEBOOK = ROOT / "notebooks" / "debugging.ipynb"


def test_every_command_is_understood() -> None:
    load_all()
    commands = [code for code in re.findall(r"`(%%?mesh[^`\n]*)`", TEXT) if not re.search(r"[A-Z]{2}", code)]
    assert len(commands) > 15
    for code in commands:
        if code.startswith("%%mesh"):
            assert parse(MESH_CELL, code.removeprefix("%%mesh")) is not None
        elif name := code.removeprefix("%mesh").strip().partition(" ")[0]:
            assert name in COMMANDS, code
            assert parse(COMMANDS[name][0], code.removeprefix(f"%mesh {name}")) is not None


def steady(text: str) -> str:
    """Return a text without colours, numbers, bars and spaces."""
    return re.sub(r"[\d.,-]+|[█░]+|\s+", "", re.sub(r"\x1b\[[0-9;]*m", "", text))


def test_outputs_are_those_of_the_notebook() -> None:
    """The lines of the page stand in cells of the notebook or their saved outputs; a notice and a path are its own."""
    cells = json.loads(NOTEBOOK.read_text())["cells"]
    parts = [part for cell in cells for part in cell["source"]]
    for output in (output for cell in cells for output in cell.get("outputs", ())):
        plain = output.get("data", {}).get("text/plain", ())
        parts += [*output.get("text", ()), *output.get("traceback", ()), *plain]
    known = steady("".join(parts))
    blocks = re.findall(r"^```\w*\n(.*?)^```$", TEXT, re.MULTILINE | re.DOTALL)
    lines = [line for block in blocks for line in block.splitlines()]
    assert len(lines) > 60
    others = [line for line in lines if steady(line) not in known]
    assert all("look: %mesh stacks" in line or line.startswith("trace:") for line in others), others
