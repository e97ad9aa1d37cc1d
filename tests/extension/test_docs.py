"""The docs' pages on magics and on debugging say what the code understands, and what the notebook shows."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from meshbook_extension.cells.run import MESH_CELL
from meshbook_extension.commands import COMMANDS, load_all
from meshbook_extension.notebook.grammar import parse

ROOT = Path(__file__).parents[2]
NOTEBOOK = ROOT / "notebooks" / "debugging.ipynb"


def text_of(page: str) -> str:
    return (ROOT / "docs" / page).read_text()


def test_every_command_and_option_is_documented() -> None:
    load_all()
    text = text_of("magics.md")
    for grammar in [MESH_CELL, *(command for command, _ in COMMANDS.values())]:
        assert f"`{grammar.name}" in text, grammar.name
        for option in grammar.options:
            assert option.name in text, f"{grammar.name} {option.name}"


@pytest.mark.parametrize("page", ["magics.md", "debugging.md"])
def test_every_command_line_is_understood(page: str) -> None:
    load_all()
    codes = re.findall(r"`(%%?mesh(?![\w-])[^`\n]*)`", text_of(page))
    lines = [code for code in codes if not re.search(r"[\[|?]|[A-Z]{2}|\b[A-Z]\b|\.\.|--help", code)]
    assert len(lines) > 15
    for line in lines:
        magic, _, rest = line.partition(" ")
        name, _, arguments = rest.partition(" ")
        if magic == "%%mesh":
            assert parse(MESH_CELL, rest) is not None
        elif name and name != "help" and (arguments or name not in COMMANDS):
            assert parse(COMMANDS[name][0], arguments) is not None


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
    blocks = re.findall(r"^```\w*\n(.*?)^```$", text_of("debugging.md"), re.MULTILINE | re.DOTALL)
    lines = [line for block in blocks for line in block.splitlines()]
    assert len(lines) > 60
    others = [line for line in lines if steady(line) not in known]
    assert all("look: %mesh stacks" in line or line.startswith("trace:") for line in others), others
