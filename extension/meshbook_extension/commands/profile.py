"""``%mesh profile``: torch.profiler over one statement, as ``%%mesh --profile`` is for a cell.

A module of its own because each group of commands is one.
"""

from __future__ import annotations

from meshbook_extension.cells.profile import TRACE
from meshbook_extension.commands import command
from meshbook_extension.notebook.grammar import Arguments, Grammar, Option
from meshbook_extension.notebook.session import Session
from meshbook_extension.notebook.targets import FORMS


@command(
    Grammar(
        name="%mesh profile",
        summary="Run a statement on the ranks under torch.profiler: a table, and one trace of all ranks for Perfetto.",
        pairs="[AXIS=.. ...]",
        options=(Option("--at", "the ranks of a named slice, or of another mesh", str, "SLICE"), TRACE),
        tail="STATEMENT",
        examples=(
            "%mesh profile train_step(batch)",
            "%mesh profile gpus=0:2 train_step(batch)",
            "%mesh profile --trace traces/ train_step(batch)",
            "%mesh profile --at left train_step(batch)",
        ),
        notes=f"""
{FORMS}
The statement is the rest of the line. For a whole cell: %%mesh --profile. Profile a few steps, not an epoch: an
operation costs some 2 microseconds and 1 kB of memory, and a million of them half a minute afterwards.""",
    )
)
def profile(session: Session, arguments: Arguments) -> None:
    """Run it, and say where its time went."""
    from meshbook_extension.cells.run import run_profiled

    at = arguments.text("--at")
    procs = session.target([at] if at else [], arguments.pairs)
    run_profiled(session, procs, arguments.tail, arguments.text(TRACE.name))
