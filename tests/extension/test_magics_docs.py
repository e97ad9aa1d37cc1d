"""docs/magics.md says what the code understands."""

from __future__ import annotations

import re
from pathlib import Path

from meshbook_extension.cells.run import MESH_CELL
from meshbook_extension.commands import COMMANDS, load_all
from meshbook_extension.notebook.grammar import parse

TEXT = (Path(__file__).parents[2] / "docs" / "magics.md").read_text()
CODE = re.findall(r"`([^`\n]+)`", TEXT)


def test_every_command_and_option_is_documented() -> None:
    load_all()
    for grammar in [MESH_CELL, *(command for command, _ in COMMANDS.values())]:
        assert any(code.startswith(grammar.name) for code in CODE), grammar.name
        for option in grammar.options:
            assert option.name in TEXT, f"{grammar.name} {option.name}"


def test_every_command_line_in_the_docs_is_understood() -> None:
    load_all()
    lines = [code for code in CODE if code.startswith("%mesh ") and not re.search(r"[\[|A-Z]|\.\.\.|[?]|--help", code)]
    assert len(lines) > 20
    for line in lines:
        name, _, rest = line.removeprefix("%mesh ").partition(" ")
        assert name == "help" or (name in COMMANDS and not rest) or parse(COMMANDS[name][0], rest) is not None
    for line in [code for code in CODE if code.startswith("%%mesh ") and not re.search(r"[A-Z]", code)]:
        assert parse(MESH_CELL, line.removeprefix("%%mesh ")) is not None
