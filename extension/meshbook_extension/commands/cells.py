"""Commands for cells: jobs beside the notebook, interrupts, auto mode, the profiler."""

from __future__ import annotations

import math
import shlex
import time

from meshbook.errors import CallInterrupted, MeshError
from meshbook.formatting import name_ranks
from meshbook.mesh import states
from meshbook.shell.scripts import read_script
from meshbook_extension.cells.profile import TRACE
from meshbook_extension.cells.run import (
    ASYNC,
    GROUP,
    ONLY,
    PROFILE,
    TIME,
    TIMEOUT,
    run_mesh_script,
    run_profiled,
)
from meshbook_extension.cells.running import Job, Jobs, interrupted, job_table, show_as
from meshbook_extension.cells.transformers import AutoMode
from meshbook_extension.commands import Command, on_ranks
from meshbook_extension.commands.values import AT, target_of
from meshbook_extension.notebook.grammar import Arguments, Option
from meshbook_extension.notebook.session import Session
from meshbook_extension.notebook.targets import FORMS
from meshbook_extension.notebook.waiting import wait_until_done
from meshbook_extension.output.labels import format_seconds, show_tables
from meshbook_extension.output.publisher import is_attended, parent_of, sink_for
from meshbook_extension.output.transcripts import Transcripts

END_LIMIT_S = 10.0
"""The time that ``%mesh cancel`` waits for a stopped job, which ends once its process groups are formed again."""


@Command(
    name="%mesh run",
    summary="Run a script that was written for torchrun, as the main program of every rank.",
    options=(
        Option("--keep", "keep its global names, for cells to use"),
        ASYNC,
        GROUP,
        ONLY,
        TIMEOUT,
        TIME,
        PROFILE,
        TRACE,
    ),
    tail="SCRIPT [ARGS]",
    examples=(
        "%mesh run train.py --lr 0.1",
        "%mesh run --keep train.py",
        "%mesh run -m package.train --epochs 3",
        "%mesh run --async train.py",
        "%mesh run --timeout 600 --only 0 train.py",
    ),
    notes="""
The script is its own __main__ on each rank, with its arguments, its folder first in sys.path, and torchrun's variables.
The process group of the mesh is there: init_process_group finds it. Arguments, paths, environment and folder are put
back at the end; names go too, unless you --keep them. A script that fails on a rank, or ends with an exit code other
than 0, fails the cell, and ranks that wait for it are freed. A part of the mesh: %%mesh gpus=0:2 above %run SCRIPT.""",
)
def run(session: Session, arguments: Arguments) -> None:
    try:
        words = shlex.split(arguments.tail)
    except ValueError:
        raise arguments.grammar.refuse(f"a quote is not closed in: {arguments.tail}") from None
    run_mesh_script(session, read_script(words, keep=arguments.flag("--keep")), arguments)


@Command(name="%mesh jobs", summary="Cells that were started with --async.", examples=("%mesh jobs",))
def list_jobs(session: Session, arguments: Arguments) -> None:
    jobs = session.part(Jobs).all()
    if not jobs:
        print("no job yet. Start one: %%mesh --async above a cell")
        return
    show_tables(sink_for(session.shell), [job_table(jobs)], "\n".join(job.describe() for job in jobs))


@Command(
    name="%mesh wait",
    summary="Wait for a job, or for all; fails as the job did. An interrupt ends the wait, not the job.",
    words="[ID]",
    options=(Option("--timeout", "wait so many seconds at most", float, "S"),),
    examples=("%mesh wait 1", "%mesh wait", "%mesh wait 1 --timeout 60"),
)
def wait(session: Session, arguments: Arguments) -> None:
    jobs = [session.part(Jobs).find(word) for word in arguments.words] or session.part(Jobs).unwaited()
    timeout_s = arguments.number("--timeout")
    deadline = None if timeout_s is None else time.monotonic() + timeout_s
    if not jobs:
        print("no job is running")
    errors: list[MeshError] = []
    is_attended_here = is_attended(parent_of(session.shell))
    told_here = {job.number for job in jobs if job.ended is None and not is_attended_here}  # their late lines come here
    for job in jobs:
        if not _wait_for(job, None if deadline is None else max(0.0, deadline - time.monotonic())):
            print(f"{job.describe()}\n  wait on: %mesh wait {job.number}    end it: %mesh cancel {job.number}")
            continue
        try:
            job.finish()
            job.waited_for = True
            job.cell.outcome()
        except MeshError as error:
            errors.append(error)
        if job.number not in told_here:
            print(f"job {job.number} {job.state} after {format_seconds(job.duration_s)}")
    if errors:
        raise errors[0]


def _wait_for(job: Job, timeout_s: float | None) -> bool:
    told = False

    def stops() -> list[int]:
        return [] if told else [*states.stopped_ranks(job.cell.procs).of(job.cell.ranks)]

    def tell_of_stops() -> float:
        nonlocal told
        if stopped := stops():
            told = True
            print(f"{name_ranks(stopped)} stopped at a prompt: interrupt this wait, then look: %mesh pdb")
        return math.inf

    try:
        return wait_until_done(job.cell.run.future, timeout_s, look=tell_of_stops, wanted=lambda: bool(stops()))
    except KeyboardInterrupt:
        raise interrupted(f"job {job.number} runs on; end it: %mesh cancel {job.number}") from None


@Command(
    name="%mesh output",
    summary="Show again what a cell on the mesh has shown, and the rest while it runs.",
    words="[CELL]",
    examples=("%mesh output", "%mesh output 7"),
    notes="""
For a page that was loaded again, or closed, while the cell ran. Without a number: the last cell on a mesh.
A megabyte is kept of each of the last 50 cells; the logs have all of it.""",
)
def output(session: Session, arguments: Arguments) -> None:
    transcript = session.part(Transcripts).find(*arguments.words)
    if transcript.is_empty:
        print(f"{transcript.what} has shown nothing")
    transcript.show(sink_for(session.shell))
    if transcript.is_running():
        print(f"{transcript.what} still runs; its output goes on here")


@Command(
    name="%mesh cancel",
    summary="Interrupt a job on its ranks; once more: insist.",
    words="ID",
    examples=("%mesh cancel 1",),
)
def cancel(session: Session, arguments: Arguments) -> None:
    """Interrupt a job and name the ranks that stopped; an error if not all did."""
    job = session.part(Jobs).find(arguments.words[0])
    if job.state != "running":
        print(f"job {job.number} has ended: {job.state} after {format_seconds(job.duration_s)}")
        return
    report = job.cell.interrupt()
    if not (report.stuck or report.skipping) and _wait_for(job, END_LIMIT_S):
        job.finish()
    _tell([(f"job {job.number} ", report)])


@on_ranks(
    name="%mesh interrupt",
    summary="Interrupt all that runs or waits on the ranks, also what did not stop before; once more: insist.",
    examples=("%mesh interrupt", "%mesh interrupt gpus=3"),
    notes="""
No target means every mesh. It also works while a cell runs, from a front end that can send it meanwhile.
The first time each rank gets a KeyboardInterrupt. The second time process groups are aborted, stopped processes
continued, and KeyboardInterrupt is raised again where it was caught. Ranks that then still do not move are named.""",
)
def interrupt(session: Session, arguments: Arguments) -> None:
    """Interrupt all ranks and name the ranks that stopped; an error if not all did."""
    if arguments.words or arguments.pairs:
        views = [session.target(arguments.words, arguments.pairs)]
    else:
        views = [procs.base() for procs in session.meshes.values() if procs.alive]
    for cell in session.part(Jobs).foreground:
        cell.output.hide_interrupts = True
    reports = [(f'mesh "{view.name}" ' if len(views) > 1 else "", view.interrupt()) for view in views]
    reports = [(prefix, report) for prefix, report in reports if report.obeyed or report.stuck or report.skipping]
    if not reports:
        print("nothing runs on the ranks")
    _tell(reports)


def _tell(reports: list[tuple[str, CallInterrupted]]) -> None:
    """Print the reports; raise them as one error when ranks did not stop, so that a run of all cells stops."""
    text = "\n".join(f"{prefix}{report}" for prefix, report in reports)
    stuck = [report for _, report in reports if report.stuck]
    if stuck:
        show_as(stuck[0], f"{type(stuck[0]).__name__}: {text}".splitlines())
        raise stuck[0]
    if text:
        print(text)


@Command(
    name="%mesh auto",
    summary="Run every cell on the mesh until off; %%local above a cell escapes.",
    words="[on|off]",
    examples=("%mesh auto on", "%mesh auto off"),
    notes="Cells that begin with %mesh or with a cell magic (%%...) stay in the notebook's process.",
)
def auto(session: Session, arguments: Arguments) -> None:
    mode = AutoMode.of(session.shell)
    word = arguments.words[0] if arguments.words else None
    if word not in (None, "on", "off"):
        raise arguments.grammar.refuse(f'say on or off, not "{word}".')
    if word == "on":
        procs = session.mesh()
        mode.switch_on(lambda: session.current)
        print(f'every cell runs on {name_ranks(procs.ranks)} of mesh "{procs.name}"')
        print("  here instead: %%local above the cell    end: %mesh auto off")
        return
    if word == "off":
        mode.switch_off()
    print(f"auto is {'on' if mode.is_on else 'off'}")


@Command(
    name="%mesh profile",
    summary="Run a statement on the ranks under torch.profiler: a table, and one trace of all ranks for Perfetto.",
    pairs="[AXIS=.. ...]",
    options=(AT, TRACE),
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
def profile(session: Session, arguments: Arguments) -> None:
    run_profiled(session, target_of(session, arguments), arguments.tail, arguments.text(TRACE.name))
