"""The command ``meshbook``: meshes outlive notebooks and hold GPUs, so a terminal sees and ends them too.

A subcommand is a module with ``add_parser(subparsers)`` and ``main(args) -> int``, and a line in `COMMANDS`. Only the
module of the command that runs is imported, so that ``meshbook list`` needs neither torch nor Jupyter. What needs a
notebook's packages comes by the entry points of `GROUP`, each of which is such a module.

Exit codes: 0; 1 where it failed; 2 for bad usage; 130 after Ctrl-C; 141 where no one reads its output any more.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib
import os
import re
import sys
from collections.abc import Sequence
from types import ModuleType
from typing import NamedTuple, NoReturn, TypeAlias

from meshbook._version import __version__
from meshbook.errors import MeshError, UsageError
from meshbook.formatting import Table, did_you_mean

GROUP = "meshbook.commands"
"""The group of entry points that add subcommands."""

FAILED, USAGE, INTERRUPTED, CLOSED = 1, 2, 130, 141
"""The exit codes."""

Subparsers: TypeAlias = "argparse._SubParsersAction[argparse.ArgumentParser]"


class Subcommand(NamedTuple):
    """A line of the table."""

    module: str  # empty where the entry point of the command's name gives it
    summary: str
    example: str


COMMANDS = {
    "list": Subcommand("meshbook.cli.meshes", "all meshes on this machine, and who has them", "meshbook list"),
    "stop": Subcommand("meshbook.cli.meshes", "end a mesh, also one of a notebook", "meshbook stop main"),
    "run": Subcommand(
        "meshbook.cli.run", "run a script of torchrun on ranks of its own", "meshbook run --gpus 8 train.py"
    ),
    "attach": Subcommand("", "go on with a mesh in a terminal's IPython", "meshbook attach main"),
    "logs": Subcommand(
        "meshbook.cli.meshes", "the lines that ranks have written", "meshbook logs main --rank 0 --follow"
    ),
    "stacks": Subcommand("meshbook.cli.meshes", "where each rank is, also while it hangs", "meshbook stacks main"),
    "doctor": Subcommand("meshbook.cli.doctor", "what is wrong here, and how to mend it", "meshbook doctor"),
    "kernel": Subcommand("", "put the kernel into Jupyter, or remove it", "meshbook kernel install --user"),
    "join": Subcommand("meshbook.join", "make this machine a host of a mesh", "meshbook join"),
    "completion": Subcommand("meshbook.cli.completion", "a script that completes by Tab", "meshbook completion bash"),
}
"""The subcommands in the order in which help lists them."""


class Parser(argparse.ArgumentParser):
    """A parser that says in one line what is wrong, and shows an example."""

    def error(self, message: str) -> NoReturn:
        found = re.search(r"invalid choice: '(.*?)' \(choose from (.*)\)", message)
        near = did_you_mean(found[1], re.findall(r"[\w-]+", found[2])) if found else ""
        raise UsageError(f"{message}.{near}")


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line; returns the exit code."""
    words = list(sys.argv[1:] if argv is None else argv)
    try:
        code = dispatch(words)
        sys.stdout.flush()
        return code
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)  # else Python complains when it flushes at its end
        return CLOSED
    except KeyboardInterrupt:
        return INTERRUPTED
    except UsageError as error:
        example = COMMANDS[words[0]].example if words and words[0] in COMMANDS else "meshbook list"
        return _complain(words, f"{error}\n  for example: {example}", USAGE)
    except (MeshError, OSError) as error:
        return _complain(words, str(error), FAILED)


def dispatch(words: Sequence[str]) -> int:
    """Run a command; returns its exit code. Raises: UsageError, MeshError, OSError."""
    name = words[0] if words else ""
    if name in ("", "-h", "--help", "help"):
        print(overview())
        return 0
    if name in ("-V", "--version"):
        print(f"meshbook {__version__}")
        return 0
    if name not in COMMANDS:
        raise UsageError(f'unknown command "{name}".{did_you_mean(name, COMMANDS)} All of them: meshbook --help')
    module = load(name)
    parser = parser_of(module)
    try:
        args, unknown = parser.parse_known_args(words)
    except SystemExit as end:  # after --help
        return int(end.code or 0)
    if unknown:
        options = parsers_in(parser)[name]._option_string_actions
        raise UsageError(f'unknown argument "{unknown[0]}".{did_you_mean(unknown[0], options)}')
    return int(module.main(args))


def load(name: str) -> ModuleType:
    """Import the module of a command. Raises: MeshError where a package is missing."""
    if path := COMMANDS[name].module:
        return importlib.import_module(path)
    from importlib.metadata import entry_points

    for entry in entry_points(group=GROUP, name=name):
        with contextlib.suppress(ModuleNotFoundError):
            module: ModuleType = entry.load()
            return module
    raise MeshError(f'"meshbook {name}" needs packages of the notebook: pip install "meshbook[notebook]"')


def parser_of(module: ModuleType) -> argparse.ArgumentParser:
    """Return the parser of the commands that a module has."""
    parser = Parser(prog="meshbook", add_help=False, allow_abbrev=False)
    module.add_parser(parser.add_subparsers(dest="command", parser_class=Parser))
    return parser


def parsers_in(parser: argparse.ArgumentParser) -> dict[str, argparse.ArgumentParser]:
    """Return the parsers of the commands below a parser, by name; none where it has no commands."""
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            return dict(action.choices)
    return {}


def overview() -> Table:
    """Return all commands, each with an example."""
    rows = [(command.example, command.summary) for command in COMMANDS.values()]
    last = "\nMore about one: meshbook stop --help    version: meshbook --version"
    return Table((), rows, title="Meshes of processes, seen from a terminal.\n", notes=[last])


def _complain(words: Sequence[str], text: str, code: int) -> int:
    command = " ".join(("meshbook", *(word for word in words[:1] if word in COMMANDS)))
    sys.stdout.flush()
    print(f"{command}: {text}", file=sys.stderr)
    return code
