"""Commands for logged scalars: their curves below running cells, and their table."""

from __future__ import annotations

from meshbook.curves.recorder import own
from meshbook.curves.series import Metrics
from meshbook.curves.table import MetricsTable
from meshbook.errors import MeshError
from meshbook.formatting import did_you_mean
from meshbook.mesh import states
from meshbook_extension.cells.curves import WatchedNames, curves_of, watch_modules
from meshbook_extension.cells.run import watch_expression
from meshbook_extension.cells.running import Jobs
from meshbook_extension.commands import Command
from meshbook_extension.commands.values import check_expression
from meshbook_extension.notebook.grammar import Arguments, Option
from meshbook_extension.notebook.session import Session
from meshbook_extension.output.curve_picture import Look, bundle
from meshbook_extension.output.labels import show_tables
from meshbook_extension.output.publisher import sink_for


def _sources(session: Session) -> list[Metrics]:
    """Return the scalars of the current mesh, if there is one, and of this process."""
    try:
        return [states.metrics(session.mesh()), own]
    except MeshError:
        return [own]


@Command(
    name="%mesh watch",
    summary="Draw the curves of logged scalars below each cell that logs them, while it runs; without names of all.",
    words="[NAME ...]",
    names="logged",
    options=(
        Option("--ranks", "a line for each rank, in place of their mean and range"),
        Option("--smooth", "a running mean: the weight of earlier values, from 0 to below 1", float, "W"),
        Option("--log", "a logarithmic axis of values"),
        Option("--x", "what the curves are drawn over", str, choices=("step", "time")),
        Option("--eval", "evaluate this on the ranks while they run a cell, and draw its curve", str, "EXPR"),
        Option("--every", "the time between two evaluations, by default 1s", float, "TIME"),
        Option("--nan", "say which module, gradient or logged name first had a NaN or an infinity, on which rank"),
        Option("--stop", "draw none from now on, and look for no NaN"),
    ),
    examples=(
        "%mesh watch",
        "%mesh watch loss lr",
        "%mesh watch loss --smooth 0.9 --log",
        "%mesh watch loss --ranks --x time",
        '%mesh watch --eval "loss.item()" --every 2s',
        "%mesh watch --nan",
        "%mesh watch --stop",
    ),
    notes="""
Programs log with meshbook.log(loss=loss, step=step): on ranks, in actors, and in the notebook itself.
What was logged before is drawn at once. The numbers: %mesh metrics, or meshbook.metrics().""",
)
def watch(session: Session, arguments: Arguments) -> None:
    watched = session.part(WatchedNames)
    is_over = arguments.flag("--stop")
    if is_over:
        watched.turn += 1
        watched.names, watched.expression = None, ""
    is_nan = arguments.flag("--nan") and not is_over
    if is_nan or (is_over and watched.nan):
        watched.nan = is_nan
        for procs in session.meshes.values():
            if procs.alive:
                watch_modules(procs, is_nan)
    if is_over or (is_nan and not arguments.words and not arguments.text("--eval")):
        return
    smooth = arguments.number("--smooth") or 0.0
    if smooth >= 1:
        raise arguments.grammar.refuse(f"--smooth takes a weight below 1, not {smooth:g}.", "--smooth")
    expression, every_s = (arguments.text("--eval") or "").strip(), arguments.number("--every")
    if expression:
        check_expression(session, expression, "%mesh watch --eval")
    elif every_s is not None:
        raise arguments.grammar.refuse("--every is the time between two evaluations of --eval EXPR.", "--every")
    watched.look = Look(arguments.flag("--ranks"), smooth, arguments.flag("--log"), arguments.text("--x") == "time")
    watched.expression, watched.every_s = expression, every_s or 1.0
    watched.turn += 1  # running cells leave the former expression
    watched.names = tuple(dict.fromkeys([*arguments.words, *filter(None, [watched.expression])]))
    sources = _sources(session)
    known = [name for source in sources for name in source.names()]
    for name in watched.names:
        if name not in (*known, watched.expression):
            have = f" Logged so far: {', '.join(dict.fromkeys(known))}." if known else ""
            print(
                f'"{name}" was not logged yet.{did_you_mean(name, known)}{have} Its curve comes with the first value.'
            )
    curves = [curve for source in sources for curve in curves_of(source, watched.chosen(source.names()))]
    if curves:
        sink_for(session.shell).display(bundle(curves, watched.look), {})
    elif not watched.names:
        print("nothing was logged yet; the curves come with the first meshbook.log(loss=loss)")
    for job in session.part(Jobs).running():
        watch_expression(session, job.cell)


@Command(
    name="%mesh metrics",
    summary="The table of logged scalars: the last value, its range over ranks, the lowest and the highest.",
    words="[NAME ...]",
    names="logged",
    examples=("%mesh metrics", "%mesh metrics loss lr"),
    notes="All values as a data frame of pandas or Polars: meshbook.metrics().frame()",
)
def metrics(session: Session, arguments: Arguments) -> None:
    """Show the table. Raises: UsageError for a name that was never logged."""
    table = MetricsTable(_sources(session), arguments.words)
    if not table.names:
        print(table)
        return
    show_tables(sink_for(session.shell), [table.table()])
