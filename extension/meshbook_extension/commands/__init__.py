"""The subcommands of ``%mesh``, each a function with its grammar in one table.

A new one is a function ``(session, arguments)`` under ``@Command(name="%mesh NAME", ...)`` in a module that
`load_all` imports; ``v = %mesh NAME`` binds the object that it returns. Help, ``?``, completion and the messages for
typos follow from the grammar.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeAlias

from meshbook.errors import UsageError
from meshbook.formatting import did_you_mean
from meshbook_extension.notebook.grammar import PAIR, Arguments, Grammar, Option, parse
from meshbook_extension.notebook.session import Session
from meshbook_extension.notebook.targets import FORMS

Runner: TypeAlias = Callable[[Session, Arguments], object]

MODULES = ("spawn", "meshes", "values", "packages", "cells", "repair", "status", "debug")
"""The modules of commands, in the order in which help lists them."""


@dataclass(frozen=True)
class Command(Grammar):
    """A subcommand; as a decorator it puts a function into the table, under the last word of its name."""

    def __call__(self, run: Runner) -> Runner:
        COMMANDS[self.name.split()[-1]] = (self, run)
        return run


COMMANDS: dict[str, tuple[Command, Runner]] = {}
"""The subcommands by name, in the order in which help lists them."""


def on_ranks(
    name: str,
    summary: str,
    examples: tuple[str, ...],
    words: str = "[SLICE]",
    options: tuple[Option, ...] = (),
    notes: str = "",
) -> Command:
    """Return a command for the ranks of a target, which may be left out."""
    notes = f"{FORMS}\n{notes.strip()}"
    return Command(name, summary, examples, words=words, pairs="[AXIS=.. ...]", options=options, notes=notes)


def load_all() -> None:
    """Import the modules that fill the table."""
    for name in MODULES:
        importlib.import_module(f"{__name__}.{name}")


def dispatch(session: Session, line: str) -> object:
    """Run the line of one ``%mesh``; returns the value that the command gives, if it gives one.

    Raises: UsageError for an unknown command, and the errors of the command.
    """
    load_all()
    name, _, rest = line.strip().partition(" ")
    if not name:
        name = "status"
    if name in ("--help", "-h", "?", "help"):
        print(help_text(rest.strip()))
        return None
    if name not in COMMANDS:
        raise _unknown(name, line)
    command, run = COMMANDS[name]
    arguments = parse(command, rest)
    if arguments.wants_help:
        print(command.help())
        return None
    return run(session, arguments)


def help_text(name: str = "") -> str:
    """Return the text of ``%mesh help``: all commands, or one of them.

    Raises: UsageError for an unknown command.
    """
    from meshbook_extension.cells.run import MESH_CELL

    load_all()
    if name in (MESH_CELL.name, "cell"):
        return MESH_CELL.help()
    if name:
        if name not in COMMANDS:
            raise _unknown(name, name)
        return COMMANDS[name][0].help()
    width = max(map(len, COMMANDS))
    lines = ["Meshes of processes, driven from a notebook.", ""]
    lines += [f"  %mesh {known:{width}}  {command.summary}" for known, (command, _) in COMMANDS.items()]
    lines += [f"  {'%mesh':{width + 6}}  The status of the current mesh."]
    lines += [f"  {MESH_CELL.name:{width + 6}}  {MESH_CELL.summary}"]
    lines += [f"  {'%%local':{width + 6}}  Run the cell in the notebook's own process, while %mesh auto is on."]
    lines += ["", "More about one: %mesh spawn --help, or %mesh spawn?"]
    return "\n".join(lines)


def _unknown(name: str, line: str) -> UsageError:
    near = did_you_mean(name, COMMANDS)
    example = "%mesh spawn gpus=4"
    if PAIR.fullmatch(name):
        near = f" Did you mean %mesh spawn {line.strip()}, or %%mesh {line.strip()} above a cell?"
    elif near:
        example = COMMANDS[near.split('"')[1]][0].examples[0]
    return UsageError(f'unknown command "{name}".{near}\n  for example: {example}\n  all of them: %mesh help')
