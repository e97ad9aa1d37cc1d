"""The command line of `debug_controller`: Monarch's commands, for prompts of ranks of all meshes of the program.

    list                        actors whose endpoints, and meshes whose cells, wait at a breakpoint
    attach NAME RANK            to the prompt of one of them, until `detach`
    cast NAME ranks(0,2) p x    a command of pdb to several
    continue                    have all of them go on, without their breakpoints

A person types at any terminal (`meshbook.mesh.debug_controller`); what is done at prompts is `DebugPrompt`'s.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Container, Mapping, Sequence
from typing import NamedTuple, TypeAlias

from meshbook.calls.rank_state import StoppedCode
from meshbook.errors import MeshError, UsageError
from meshbook.mesh.driven import own_meshes
from meshbook.mesh.proc_mesh import ProcMesh
from meshbook.mesh.prompt import DebugPrompt, Terminal

PROMPT = "debugger> "
HELP = """\
list                          what waits at a breakpoint
attach NAME RANK              open its prompt: pdb's commands; detach leaves it
cast NAME ranks(WHICH) CMD    CMD of pdb to several: ranks(1)  ranks(0,2)  ranks(0:8:2)  ranks(gpus=0:2,hosts=(1,3))
continue                      have all go on, without their breakpoints
quit                          leave the debugger, and what waits as it is
The first letter of a command does, but for cast."""

_LIST = re.compile(r"\s*(\d+)\s*(?:,\s*\d+\s*)+")
_RANGE = re.compile(r"\s*(\d*)\s*:\s*(\d*)\s*(?::\s*(\d*)\s*)?")
_DIM = re.compile(r"\s*([A-Za-z_]\w*)\s*=\s*(\([^()]*\)|[^,()]*)\s*(?:,|$)")
_CAST = re.compile(r"cast\s+(\S+)\s+ranks\(((?:[^()]|\([^()]*\))*)\)\s*(.*)", re.DOTALL)

Ranks: TypeAlias = "Container[int] | Mapping[str, Container[int]]"
"""Ranks, or along each dim that was named the indices."""


class DebugSessionInfo(NamedTuple):
    """Code of a rank that waits at a breakpoint; in the order of names and ranks."""

    actor_name: str
    """For a cell, the name of its mesh."""
    rank: int
    coords: dict[str, int]
    hostname: str
    function: str | None
    lineno: int | None


class _Stopped(NamedTuple):
    info: DebugSessionInfo
    procs: ProcMesh
    """The whole mesh."""


def stopped_sessions() -> list[DebugSessionInfo]:
    """What waits at breakpoints now, of all meshes that this process drives."""
    return [each.info for each in _stopped()]


def _stopped() -> list[_Stopped]:
    found = []
    for procs in own_meshes():
        stops = procs.stopped_ranks.of(procs.ranks)
        if not stops:
            continue
        codes = procs.select(sorted(stops)).ask_for(StoppedCode, "pdb_session")
        for rank in stops:
            if (code := codes.get(rank)) is not None:  # else it has gone on
                info = DebugSessionInfo(
                    code.actor or procs.name, rank, dict(procs.members.point(rank)),
                    procs._mesh.host_of(rank).name, code.function or None, code.line or None,
                )  # fmt: skip
                found.append(_Stopped(info, procs))
    return sorted(found, key=lambda each: each.info[:2])


def table(sessions: Sequence[DebugSessionInfo]) -> str:
    """A row for each."""
    if not sessions:
        return "nothing waits at a breakpoint"
    rows = [("actor", "rank", "coords", "host", "function", "line")]
    for each in sessions:
        coords = ", ".join(f"{name}={index}" for name, index in each.coords.items())
        rows.append(
            (each.actor_name, str(each.rank), coords, each.hostname, each.function or "", str(each.lineno or ""))
        )
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return "\n".join("  ".join(map(str.ljust, row, widths)).rstrip() for row in rows)


def serve(terminal: Terminal) -> None:
    """Have a person type commands until ``quit``, or the end of what they type."""
    terminal.say("Debugger of this program's meshes. Commands: help; what waits: list")
    while True:
        try:
            line = terminal.read(PROMPT, lambda: True)
        except EOFError:
            return
        if line is None or line.strip() in ("q", "quit"):
            return
        try:
            obey(line.strip(), terminal)
        except MeshError as error:
            terminal.say(str(error))


def obey(line: str, terminal: Terminal) -> None:
    """Do as one line says. Raises: UsageError, MeshError."""
    word, _, rest = line.partition(" ")
    simple: dict[str, Callable[[], None]] = {
        "": lambda: None,
        "help": lambda: terminal.say(HELP),
        "list": lambda: terminal.say(table(stopped_sessions())),
        "continue": lambda: _continue(terminal),
    }
    simple |= {name[0]: action for name, action in simple.items() if name}
    if line in simple:
        simple[line]()
    elif word in ("a", "attach"):
        _attach(rest, terminal)
    elif word == "cast":
        _cast(line, terminal)
    else:
        raise UsageError(f"there is no command {line!r}; those that there are: help")


def _attach(rest: str, terminal: Terminal) -> None:
    name, _, rank = rest.strip().rpartition(" ")
    if not name or not rank.isdigit():
        raise UsageError("attach to what? For example: attach trainers 3")
    _, procs = _named(name.strip(), {int(rank)})[0]
    prompt = DebugPrompt(procs.select([int(rank)]), terminal)
    if not prompt.attend(lambda: False, int(rank)):
        terminal.say(f"{name.strip()} {rank} goes on")


def _cast(line: str, terminal: Terminal) -> None:
    found = _CAST.fullmatch(line)
    if found is None or not found[3]:
        raise UsageError("cast what to whom? For example: cast trainers ranks(0:4) p loss")
    name, which, command = found.groups()
    _send(_named(name, parsed_ranks(which)), terminal, command)


def _continue(terminal: Terminal) -> None:
    stopped = _stopped()
    _send(stopped, terminal, "clear")
    _send(stopped, terminal, "continue")


def _named(name: str, ranks: Ranks) -> list[_Stopped]:
    """Raises: UsageError where nothing of that name waits there."""
    known = _stopped()
    of_name = [each for each in known if each.info.actor_name == name]
    if found := [each for each in of_name if _is_among(each.info, ranks)]:
        return found
    if not of_name:
        names = ", ".join(sorted({each.info.actor_name for each in known})) or "nothing"
        raise UsageError(f'"{name}" does not wait at a breakpoint; {names} does. See them all: list')
    waits = ", ".join(str(each.info.rank) for each in of_name)
    raise UsageError(f'of "{name}" only rank {waits} waits at a breakpoint. See them all: list')


def _is_among(info: DebugSessionInfo, ranks: Ranks) -> bool:
    if isinstance(ranks, Mapping):
        return all(name in info.coords and info.coords[name] in wanted for name, wanted in ranks.items())
    return info.rank in ranks


def _send(stopped: Sequence[_Stopped], terminal: Terminal, command: str) -> None:
    """A command of pdb to all of them; what they answer is shown."""
    ranks: dict[int, tuple[ProcMesh, list[int]]] = {}
    for info, procs in stopped:
        ranks.setdefault(procs.id, (procs, []))[1].append(info.rank)
    for procs, own in ranks.values():
        DebugPrompt(procs.select(own), terminal).cast(command)


def parsed_ranks(text: str) -> Ranks:
    """What stands within ``ranks()``. Raises: UsageError."""
    if not _DIM.match(text):
        return _parsed(text)
    dims, at = {}, 0
    while at < len(text):
        if (found := _DIM.match(text, at)) is None:
            raise _no_ranks(text)
        dims[found[1]] = _parsed(found[2].strip().removeprefix("(").removesuffix(")"))
        at = found.end()
    return dims


def _parsed(text: str) -> Container[int]:
    if text.strip().isdigit():
        return {int(text)}
    if _LIST.fullmatch(text):
        return {int(each) for each in text.split(",")}
    if (found := _RANGE.fullmatch(text)) is not None and found[3] != "0":
        start, stop, step = found.groups()
        return range(int(start or 0), int(stop) if stop else 1 << 62, int(step or 1))
    raise _no_ranks(text)


def _no_ranks(text: str) -> UsageError:
    return UsageError(
        f"ranks({text}) names no ranks; they are named as in ranks(1), ranks(0,2), ranks(0:8:2) or "
        "ranks(gpus=0:2,hosts=(1,3))."
    )
