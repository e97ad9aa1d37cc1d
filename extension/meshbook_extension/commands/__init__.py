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
from meshbook.formatting import Table, did_you_mean
from meshbook_extension.cells.run import MESH_CELL
from meshbook_extension.notebook.grammar import PAIR, Arguments, Grammar, Option, parse
from meshbook_extension.notebook.session import Session
from meshbook_extension.notebook.targets import FORMS
from meshbook_extension.output.labels import show_tables
from meshbook_extension.output.publisher import sink_for

Runner: TypeAlias = Callable[[Session, Arguments], object]

START, RUN, DATA, LOOK, REPAIR = "Start", "Run", "Data", "Look", "Repair"
MODULES = {
    "spawn": START,
    "meshes": START,
    "cells": RUN,
    "packages": RUN,
    "values": DATA,
    "checkpoints": DATA,
    "export": DATA,
    "status": LOOK,
    "curves": LOOK,
    "repair": REPAIR,
    "debug": REPAIR,
}
"""The modules of commands, each with its group, in the order in which help lists them."""
SYNONYMS = {
    "run": "torchrun script",
    "export": "nbconvert convert write tangle",
    "stop": "kill quit exit shutdown terminate end close delete",
    "respawn": "restart reset reboot",
    "status": "show widget ps info view gpu memory htop",
    "list": "ls meshes sessions",
    "spawn": "start create launch init new",
    "push": "send put set copy upload",
    "pull": "get fetch download read",
    "eval": "print echo",
    "watch": "plot chart graph curve curves tensorboard",
    "metrics": "log scalars table",
    "stacks": "trace traceback where bt hang",
    "errors": "history failures",
    "vars": "variables whos who env locals",
    "diff": "compare check same",
    "save": "checkpoint dump store",
    "restore": "load resume",
    "heal": "repair fix recover",
    "grow": "resize scale add",
    "shrink": "remove",
    "attach": "connect reconnect join",
    "sync": "reload",
    "pip": "install uv conda",
    "pdb": "breakpoint",
}
"""Words that people try for a command, which they are told."""
DESTRUCTIVE = frozenset({"stop", "respawn", "shrink", "cancel", "detach"})
"""Commands that no word is told by its letters alone."""
ON_RANKS = {
    "exec": "x = rank",
    "execute": "x = rank",
    "python": "x = rank",
    "sh": "!nvidia-smi",
}
"""Commands that people try where they need a cell on the ranks, each with an example of such a cell."""


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
    name, _, rest = (line.strip() or "status").partition(" ")
    if name in ("--help", "-h", "?", "help"):
        show_help(session, rest.strip())
        return None
    if name not in COMMANDS:
        raise _unknown(name, line)
    command, run = COMMANDS[name]
    arguments = parse(command, rest)
    if arguments.wants_help:
        print(command.help())
        return None
    return run(session, arguments)


def show_help(session: Session, name: str = "") -> None:
    """Answer ``%mesh help``: all commands, or one of them. Raises: UsageError for an unknown command."""
    load_all()
    if not name:
        show_tables(sink_for(session.shell), help_tables())
    elif name in (MESH_CELL.name, "cell"):
        print(MESH_CELL.help())
    elif name in COMMANDS:
        print(COMMANDS[name][0].help())
    else:
        raise _unknown(name, name)


def help_tables() -> list[Table]:
    """Return all commands, a table for each group, between a first and a last line."""
    load_all()
    width = max(map(len, COMMANDS)) + len("%mesh ")
    rows: dict[str, list[tuple[str, str]]] = {group: [] for group in dict.fromkeys(MODULES.values())}
    rows[RUN] += [(MESH_CELL.name, MESH_CELL.summary)]
    for known, (command, run) in COMMANDS.items():
        group = MODULES.get(run.__module__.rpartition(".")[2], LOOK)
        rows[group].append((f"%mesh {known}", command.summary))
    rows[RUN] += [("%%local", "Run the cell in the notebook's own process, while %mesh auto is on.")]
    first = "Meshes of processes, driven from a notebook. First: %mesh spawn gpus=4, then %%mesh above a cell."
    last = "More about one: %mesh spawn --help, or %mesh spawn?    the current mesh: %mesh"
    tables = [
        Table((), [(f"{shown:{width}}", summary) for shown, summary in commands], "<=", title=f"\n{group}")
        for group, commands in rows.items()
    ]
    return [Table((), (), title=first), *tables, Table((), (), title=f"\n{last}")]


def _unknown(name: str, line: str) -> UsageError:
    near = did_you_mean(name, COMMANDS.keys() - DESTRUCTIVE)
    if meant := next((command for command, words in SYNONYMS.items() if name.lower() in words.split()), ""):
        near = f' Did you mean "{meant}"?'
    example = "%mesh spawn gpus=4"
    if cell := ON_RANKS.get(name.lower()):
        return UsageError(f'unknown command "{name}". A cell runs on the ranks below %%mesh:\n  %%mesh\n  {cell}')
    if PAIR.fullmatch(name):
        near = f" Did you mean %mesh spawn {line.strip()}, or %%mesh {line.strip()} above a cell?"
    elif near:
        example = COMMANDS[near.split('"')[1]][0].examples[0]
    return UsageError(f'unknown command "{name}".{near}\n  for example: {example}\n  all of them: %mesh help')
