"""Code for the ranks: ``%mesh sync`` sends the modules beside the notebook, ``%mesh pip`` installs packages."""

from __future__ import annotations

import importlib
import re
import shlex
from collections.abc import Collection, Iterable, Mapping
from pathlib import Path

from meshbook.calls.output import OutputEvent, OutputTarget, StreamText, without_joins
from meshbook.errors import MeshError
from meshbook.formatting import group_ranks, name_ranks
from meshbook.mesh import states
from meshbook.mesh.proc_mesh import ProcMesh
from meshbook.mesh.proc_view import new_output_id
from meshbook.mesh.rank_calls import execute_as
from meshbook.shape.value_mesh import ValueMesh
from meshbook.workspace.modules import (
    FAILED,
    OTHER,
    RELOADED,
    SAME,
    SENT,
    LocalModule,
    Synced,
    find_modules,
    take_modules,
)
from meshbook.workspace.packages import PipResult, environment, run_pip
from meshbook_extension.cells.prompt import CallOutput
from meshbook_extension.cells.running import interrupted
from meshbook_extension.commands import Command
from meshbook_extension.notebook.grammar import Arguments
from meshbook_extension.notebook.session import Session
from meshbook_extension.output.labels import count
from meshbook_extension.output.publisher import sink_for

HERE = -1
"""The number that stands for the notebook's own process among ranks."""

NAMED = 6
"""The most names of modules in the note on those not reloaded."""

SAYS_MUCH = ("install", "uninstall", "download", "wheel", "sync")
"""Commands of pip that take long and say much; of others all is shown."""

KEPT_CHARS, PLACES = 100_000, 3
_RESULT = re.compile(r"^(Successfully .+|Requirement already satisfied: \S+)", re.MULTILINE)
_WARNING = re.compile(r"^\s*(?:WARNING|ERROR|DEPRECATION|warning|error)\b.*", re.MULTILINE)


class SentModules:
    """The modules that were sent to a notebook's meshes, which new ranks get too."""

    def __init__(self) -> None:
        self._of: dict[int, dict[str, LocalModule]] = {}

    def keep(self, mesh: int, modules: Iterable[LocalModule]) -> None:
        """Keep modules that were sent, in their last version."""
        kept = self._of.setdefault(mesh, {})
        for module in modules:
            kept.pop(module.name, None)  # the order is that of the last time
            kept[module.name] = module

    def of(self, mesh: int) -> list[LocalModule]:
        """Return all of a mesh, in order."""
        return list(self._of.get(mesh, {}).values())


@Command(
    name="%mesh sync",
    summary="Send the Python modules beside the notebook to the ranks, and reload those that are in use.",
    words="[PATH]",
    examples=("%mesh sync", "%mesh sync helpers.py", "%mesh sync src"),
    notes="""
PATH is a module's file, a package, or a folder that has some; by default the notebook's own. What is in use in
another version, or imports such a module, is reloaded, in the notebook too, and names that were imported from it get
the new functions and classes; objects of old classes stay what they are. Ranks that come later, by %mesh heal or grow,
get the same.""",
)
def sync(session: Session, arguments: Arguments) -> None:
    procs = session.mesh().base()
    found = find_modules(Path(*arguments.words).expanduser())
    for name, problem in found.broken.items():
        print(f"{name} is left out, it does not parse: {problem}")
    if not found.modules:
        return
    taken = _send(procs, found.modules)
    taken[HERE] = take_modules(found.modules, session.shell.user_ns)
    well = [each for each in found.modules if all(result[each.name].state != FAILED for result in taken.values())]
    session.part(SentModules).keep(procs.id, well)
    problems = [line for module in found.modules for line in _describe(module, taken)]
    print(_count(found.modules, taken))
    if problems:
        raise MeshError("\n".join(problems))


def send_again(session: Session, procs: ProcMesh, ranks: Collection[int]) -> None:
    """Send new ranks the modules that the others have."""
    modules = session.part(SentModules).of(procs.id)
    if modules and ranks:
        _send(procs.base().select(sorted(ranks)), modules)
        print(f"  {name_ranks(ranks)} got {count(len(modules), 'module')} of %mesh sync")


def _send(procs: ProcMesh, modules: Collection[LocalModule]) -> dict[int, dict[str, Synced]]:
    try:
        values = execute_as(procs, "%mesh sync", take_modules, tuple(modules)).get()
    except KeyboardInterrupt:
        raise interrupted("some ranks may not have the modules; again: %mesh sync") from None
    return dict(zip(values.ranks, values.values(), strict=True))


def _describe(module: LocalModule, taken: dict[int, dict[str, Synced]]) -> list[str]:
    """Print the places of a module that was reloaded somewhere; returns the problems, in a line each."""
    groups = group_ranks((place, result[module.name]) for place, result in taken.items())
    said = {RELOADED: "reloaded", SAME: "already there", SENT: "not imported yet"}
    if any(result.state == RELOADED for result in groups):
        parts = [f"{said[each.state]} {_name_places(at)}" for each, at in groups.items() if each.state in said]
        print(f"{module.name} {module.version}: {', '.join(parts)}")
    means = {FAILED: "could not be reloaded {}, where the version before stays: {}", OTHER: "is not used {}: {}"}
    return [
        f"{module.name} {means[result.state].format(_name_places(places), result.problem)}"
        for result, places in groups.items()
        if result.state in means
    ]


def _name_places(places: Collection[int]) -> str:
    ranks = [place for place in places if place != HERE]
    here = "in the notebook"
    if not ranks:
        return here
    return f"on {name_ranks(ranks)}" + (f" and {here}" if HERE in places else "")


def _count(modules: Collection[LocalModule], taken: dict[int, dict[str, Synced]]) -> str:
    unused, unchanged = [], []
    for module in modules:
        states = {result[module.name].state for result in taken.values()}
        if states == {SENT}:
            unused.append(module.name)
        elif states <= {SENT, SAME}:
            unchanged.append(f"{module.name} {module.version}")
    parts = [
        f"; {what}: {', '.join(names[:NAMED])}" + (f" and {len(names) - NAMED} more" if len(names) > NAMED else "")
        for what, names in (("unchanged", unchanged), ("not in use yet", unused))
        if names
    ]
    return f"{count(len(modules), 'module')} sent{''.join(parts)}"


@Command(
    name="%mesh pip",
    summary="Run pip once in each environment that ranks have: on every host, and not twice where hosts share one.",
    tail="COMMAND",
    examples=("%mesh pip install einops", "%mesh pip install -U 'transformers>=4.50'", "%mesh pip list"),
    notes="""
The rest of the line goes to pip as it stands, to uv where an environment has no pip. While it
installs, one line says so; then what they say of the end is shown,
once where it is the same, and all words of one that fails. Of other commands, as list, all is shown. Ranks that have
imported another version of a package keep it until they are started again.""",
)
def pip(session: Session, arguments: Arguments) -> None:
    procs = session.mesh().base()
    words = shlex.split(arguments.tail)
    try:
        shared: dict[tuple[str, str], int] = {}
        for rank, its in zip(procs.ranks, procs.execute(environment).get().values(), strict=True):
            shared.setdefault(its, rank)
        runs = _run(session, procs, list(shared.values()), words)
        procs.execute(importlib.invalidate_caches).get()
    except KeyboardInterrupt:
        raise interrupted("pip was interrupted; what it had done stays") from None
    problems = [
        f"{_place(procs, rank)}: {result.problem or f'pip ended with exit code {result.code}, its words are above'}"
        for rank, result in zip(runs.ranks, runs.values(), strict=True)
        if result.code
    ]
    if problems:
        raise MeshError("\n".join(problems))
    if replaced := dict.fromkeys(name for result in runs.values() for name in result.replaced):
        print(f"ranks that have imported {', '.join(replaced)} before keep that version: %mesh respawn rank=:")
    print(f"done in {count(len(shared), 'environment')}")


def _run(session: Session, procs: ProcMesh, ranks: list[int], words: list[str]) -> ValueMesh[PipResult]:
    """Run pip on ``ranks``; of a command that says much show the end, or all of it where it failed."""
    where, output = procs.select(ranks), session.part(CallOutput)
    if words[0] not in SAYS_MUCH:
        runs = execute_as(where, "%mesh pip", run_pip, words).get()
        output.output(procs).drain()  # the lines below are about pip's own
        return runs
    texts = dict.fromkeys(ranks, "")

    def keep(event: OutputEvent) -> None:
        if isinstance(event, StreamText) and event.rank in texts:
            texts[event.rank] = (texts[event.rank] + without_joins(event.text))[-KEPT_CHARS:]

    sink = sink_for(session.shell)
    sink.bars([f"pip: {words[0]} in {count(len(ranks), 'environment')}"])
    try:
        with output.diverted(OutputTarget(new_output_id(procs), keep)):
            future = execute_as(where, "%mesh pip", run_pip, words)
        runs = future.get()
    finally:
        sink.bars([])
    failed = [rank for rank, result in zip(runs.ranks, runs.values(), strict=True) if result.code]
    for rank in failed:
        if texts[rank]:
            print(f"{_place(procs, rank)}:\n{texts[rank].rstrip()}")
    if not failed:
        print_results({_place(procs, rank): text for rank, text in texts.items()})
    return runs


def print_results(texts: Mapping[str, str]) -> None:
    """Print the results and warnings in pip's words, by where it ran, once where they are the same."""
    said: dict[str, list[str]] = {}
    for place, text in texts.items():
        results = _RESULT.findall(text)
        for line in dict.fromkeys([*(found.strip() for found in _WARNING.findall(text)), *results[-1:]]):
            said.setdefault(line, []).append(place)
    for line, places in said.items():
        more = f" and {len(places) - PLACES} more" if len(places) > PLACES else ""
        print(line if len(places) == len(texts) else f"{', '.join(places[:PLACES])}{more}: {line}")


def _place(procs: ProcMesh, rank: int) -> str:
    """Return the place of a rank's environment, for people."""
    return f"host {states.host_of(procs, rank)}" if len(set(procs.hosts)) > 1 else name_ranks([rank])
