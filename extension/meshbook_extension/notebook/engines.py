"""Who starts hosts, as ``--on`` says it: of a new mesh, of hosts beside those that it has, and in their places."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from meshbook.errors import UsageError
from meshbook.formatting import did_you_mean
from meshbook.launchers.registry import ENGINES, Asked, parse
from meshbook_extension.notebook.grammar import Arguments, Option
from meshbook_extension.output.labels import parse_duration

if TYPE_CHECKING:
    from meshbook.launchers.base import Launcher
    from meshbook.mesh.proc_mesh import ProcMesh

HOSTS = "hosts"
"""The axis that counts machines; all others count processes on each."""

ON = Option(
    "--on",
    "who starts the hosts: this machine by itself, another one's daemon, an engine, or you",
    str,
    "|".join(engine.usage for engine in ENGINES.values()),
)
PYTHON = Option("--python", "the interpreter on hosts elsewhere", str, "PATH")
WITHIN = Option(
    "--within", "how long it may go without progress (2m), or hosts of manual take to come (30m)", str, "TIME"
)


def read_engine(arguments: Arguments, device: str | None, count_ranks: Callable[[], int]) -> Launcher:
    """Who starts the hosts. device: of the ranks. count_ranks: says how many each host has. Raises: UsageError."""
    text = arguments.text("--on") or "local"
    name, colon, named = text.partition(":")
    if (engine := ENGINES.get(name)) is None:
        there = ", ".join(each.usage for each in ENGINES.values())
        near = did_you_mean(name, ENGINES)
        raise arguments.grammar.refuse(f'unknown engine "{name}".{near} There is: {there}.', "ssh:")
    if colon and ":" not in engine.usage:
        raise arguments.grammar.refuse(f'the engine {name} has no hosts to name, but got "{named}".')
    if arguments.rest and not engine.has_options:
        rest = " ".join(arguments.rest)
        raise arguments.grammar.refuse(f'the engine {name} has no options, but got "{rest}" after "--".')
    asked = Asked(
        named,
        arguments.text(PYTHON.name),
        arguments.rest,
        read_within(arguments),
        device,
        count_ranks,
        not arguments.flag("--no-torch"),
    )
    try:
        return parse(name, asked)
    except UsageError as error:
        raise arguments.grammar.refuse(str(error), name) from None


def read_within(arguments: Arguments) -> float | None:
    """Seconds that ``--within`` says, if it is given. Raises: UsageError."""
    text = arguments.text(WITHIN.name)
    return None if text is None else parse_duration(text, WITHIN.name)


def read_other_engine(arguments: Arguments, procs: ProcMesh) -> Launcher | None:
    """Who starts more hosts of a mesh; None where that is who started the others. Raises: UsageError."""
    if arguments.text("--on") is None:
        if arguments.text(PYTHON.name) is not None:
            raise arguments.grammar.refuse("--python is for hosts of another engine: name it by --on.", "--on")
        if arguments.rest:
            raise arguments.grammar.refuse("what follows -- is for another engine: name it by --on.", "--on")
        return None
    return read_engine(arguments, procs.device, lambda: len(procs) // len(procs.hosts))
