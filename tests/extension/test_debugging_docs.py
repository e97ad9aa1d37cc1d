"""The commands of docs/debugging.md are understood."""

from __future__ import annotations

import re
from pathlib import Path

from meshbook_extension.cells.run import MESH_CELL
from meshbook_extension.commands import COMMANDS, load_all
from meshbook_extension.notebook.grammar import parse

TEXT = (Path(__file__).parents[2] / "docs" / "debugging.md").read_text()


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
