"""``%mesh pip``: packages for all ranks, installed once in each environment."""

from __future__ import annotations

import importlib
import shlex

from meshbook.errors import MeshError
from meshbook.formatting import name_ranks
from meshbook_extension.cells.call_output import CallOutput
from meshbook_extension.cells.running import interrupted
from meshbook_extension.commands import Command
from meshbook_extension.notebook.grammar import Arguments
from meshbook_extension.notebook.session import Session
from meshbook_extension.output.labels import count


@Command(
    name="%mesh pip",
    summary="Run pip once in each environment that ranks have: on every host, and not twice where hosts share one.",
    tail="COMMAND",
    examples=("%mesh pip install einops", "%mesh pip install -U 'transformers>=4.50'", "%mesh pip list"),
    notes="""
The rest of the line goes to pip as it stands, to uv where an environment has no pip. What it prints is shown once where
it is the same. Ranks that have imported another version of a package keep it until they are started again.""",
)
def pip(session: Session, arguments: Arguments) -> None:
    """Run pip on one rank for each environment."""
    from meshbook.workspace.packages import environment, run_pip

    procs = session.mesh().base()
    words = shlex.split(arguments.tail)
    try:
        shared: dict[tuple[str, str], int] = {}
        for rank, its in zip(procs.ranks, procs.execute(environment).get().values(), strict=True):
            shared.setdefault(its, rank)
        runs = procs.select(list(shared.values())).execute_as("%mesh pip", run_pip, words).get()
        procs.execute(importlib.invalidate_caches).get()
    except KeyboardInterrupt:
        raise interrupted("pip was interrupted; what it had done stays") from None
    session.part(CallOutput).output(procs).drain()  # what is said now is about what pip has said
    problems = [
        f"{name_ranks([rank])}: {result.problem or f'pip ended with exit code {result.code}, its words are above'}"
        for rank, result in zip(runs.ranks, runs.values(), strict=True)
        if result.code
    ]
    if problems:
        raise MeshError("\n".join(problems))
    if replaced := dict.fromkeys(name for result in runs.values() for name in result.replaced):
        print(f"ranks that have imported {', '.join(replaced)} before keep that version: %mesh respawn rank=:")
    print(f"done in {count(len(shared), 'environment')}")
