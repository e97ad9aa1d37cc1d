"""``%mesh pip``: packages for all ranks, installed once in each environment."""

from __future__ import annotations

import importlib
import shlex
from typing import TYPE_CHECKING

from meshbook.errors import MeshError
from meshbook.formatting import name_ranks
from meshbook_extension.cells.call_output import CallOutput
from meshbook_extension.cells.running import interrupted
from meshbook_extension.commands import Command
from meshbook_extension.commands.pip_progress import PROGRESSES, PipProgress
from meshbook_extension.notebook.grammar import Arguments
from meshbook_extension.notebook.session import Session
from meshbook_extension.output.labels import count
from meshbook_extension.output.publisher import sink_for

if TYPE_CHECKING:
    from meshbook.mesh.proc_mesh import ProcMesh
    from meshbook.shape.value_mesh import ValueMesh
    from meshbook.workspace.packages import PipResult


@Command(
    name="%mesh pip",
    summary="Run pip once in each environment that ranks have: on every host, and not twice where hosts share one.",
    tail="COMMAND",
    examples=("%mesh pip install einops", "%mesh pip install -U 'transformers>=4.50'", "%mesh pip list"),
    notes="""
The rest of the line goes to pip as it stands, to uv where an environment has no pip. While it
installs, one line says how many environments are done and what the others do; then what they say of the end is shown,
once where it is the same, and all words of one that fails. Of other commands, as list, all is shown. Ranks that have
imported another version of a package keep it until they are started again.""",
)
def pip(session: Session, arguments: Arguments) -> None:
    """Run pip on one rank for each environment."""
    from meshbook.workspace.packages import environment

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
    """Run it, and show what it says."""
    from meshbook.workspace.packages import run_pip

    where, output = procs.select(ranks), session.part(CallOutput)
    if words[0] not in PROGRESSES:
        runs = where.execute_as("%mesh pip", run_pip, words).get()
        output.output(procs).drain()  # what is said now is about what pip has said
        return runs
    names = {rank: _place(procs, rank) for rank in ranks}
    progress = PipProgress(procs.new_output_id(), names, sink_for(session.shell), session.publisher)
    try:
        with output.diverted(progress.target):
            future = where.execute_as("%mesh pip", run_pip, words)
        runs = future.get()
    finally:
        progress.finish()
    for rank, result in zip(runs.ranks, runs.values(), strict=True):
        if result.code and (said := progress.words(rank)):
            print(f"{names[rank]}:\n{said}")
    for line in progress.summary() if not any(result.code for result in runs.values()) else ():
        print(line)
    return runs


def _place(procs: ProcMesh, rank: int) -> str:
    """Return where an environment is that a rank has, for people."""
    return f"host {procs.host_of(rank)}" if len(set(procs.hosts)) > 1 else name_ranks([rank])
