"""``%%mesh``, which runs a cell on every rank of a target."""

from __future__ import annotations

import contextlib
import sys
import time

from IPython.core.interactiveshell import ExecutionInfo

from meshbook.calls.call_future import CellRun
from meshbook.errors import CallError, CallFailed, MeshError, UsageError, WorkerLost
from meshbook.formatting import name_ranks
from meshbook.mesh import states
from meshbook.mesh.proc_mesh import ProcMesh
from meshbook.mesh.rank_calls import start_cell
from meshbook.shape.members import members_of
from meshbook.shape.value_mesh import ValueMesh
from meshbook.shell.scripts import Script
from meshbook_extension.cells.curves import WatchedExpression, WatchedNames, watch_modules
from meshbook_extension.cells.hang_watch import CellHooks, WatchedCell
from meshbook_extension.cells.output import open_output, page_of
from meshbook_extension.cells.profile import TRACE, CellProfile
from meshbook_extension.cells.prompt import CellLeft, CellPrompt
from meshbook_extension.cells.running import Job, Jobs, RunningCell, brief, show_lost, verdict
from meshbook_extension.cells.transformers import check_syntax
from meshbook_extension.notebook.grammar import Arguments, Grammar, Option, parse
from meshbook_extension.notebook.session import Session
from meshbook_extension.notebook.targets import FORMS, RANK, Setup, choose
from meshbook_extension.output.labels import FAILURE, NEWS, NOTICE, count, format_seconds, show_tables
from meshbook_extension.output.publisher import Scheduled, is_attended, parent_of, sink_for
from meshbook_extension.output.rank_times import chart, charts, headline, times_of
from meshbook_extension.output.transcripts import Transcripts

GROUPS = ("rank", "equal", "none")

ASYNC = Option("--async", "go on with the notebook while it runs; see %mesh jobs")
GROUP = Option("--group", "merge equal lines of ranks (equal), a block per rank, or nothing", str, choices=GROUPS)
ONLY = Option("--only", "show the output of these ranks alone; all of it is in %mesh logs", str, "RANKS")
TIMEOUT = Option("--timeout", "interrupt the ranks after so many seconds", float, "S")
TIME = Option("--time", "show how long the ranks took, and what of it they worked or waited in collectives")
PROFILE = Option("--profile", "run it under torch.profiler: a table, and one trace of all ranks for Perfetto")

MESH_CELL = Grammar(
    name="%%mesh",
    summary="Run the cell on every rank of the target: Python, IPython magics, !commands, top-level await, plots.",
    words="[SLICE]",
    pairs="[AXIS=.. ...]",
    options=(
        ASYNC,
        Option("--out", "bind the result, a ValueMesh, to this name too", str, "VAR"),
        GROUP,
        ONLY,
        TIMEOUT,
        Option("--no-collective", "a collective in the cell raises, rather than wait for ranks outside of the target"),
        TIME,
        PROFILE,
        TRACE,
        Option("--setup", "%mesh heal runs it again on ranks that it starts, in the order of these cells"),
    ),
    examples=(
        "%%mesh",
        "%%mesh gpus=0",
        "%%mesh hosts=1 gpus=0:2 --time",
        "%%mesh rank=0,2 --no-collective",
        "%%mesh --async --out losses",
        "%%mesh --timeout 30",
        "%%mesh --group rank",
        "%%mesh --only 0",
        "%%mesh --profile",
        "%%mesh --profile --trace traces/",
        "%%mesh --setup",
    ),
    notes=f"""
{FORMS}
No target means the whole current mesh.

Ranks see rank, local_rank, world_size, point (their coordinates), mesh (the torch DeviceMesh with the same axes),
device, dist, torch, and the environment that torchrun would set. Variables stay from cell to cell.
The last expression is shown, equal ones once, and kept as a ValueMesh in _mesh.
Interrupt stops the cell on all ranks; their variables stay.""",
)


def run_mesh_cell(session: Session, line: str, code: str) -> None:
    """Execute ``%%mesh LINE`` over ``code``.

    Raises: the errors of the ranks, so that the notebook's cell fails too.
    """
    arguments = parse(MESH_CELL, line)
    if arguments.wants_help:
        print(MESH_CELL.help())
        return
    _check(arguments, code)
    cell_number = _cell_number(session)
    content, history = parent_of(session.shell).get("content") or {}, session.shell.history_manager
    whole = str(content.get("code") or (history.input_hist_raw[-1] if history is not None else ""))
    line_offset = _lines_above(whole, code)
    check_syntax(code, cell_number, line_offset)
    procs = session.target(arguments.words, arguments.pairs)
    is_left = _run(session, procs, code, arguments, line_offset, session.part(CellHooks).name_cell(procs, whole))
    if arguments.flag("--setup") and not is_left:
        cell_id = str((parent_of(session.shell).get("metadata") or {}).get("cellId") or "")
        session.setups.add(Setup(procs.name, arguments.pairs, code, cell_number, line_offset, cell_id))


def run_mesh_script(session: Session, script: Script, arguments: Arguments) -> None:
    """Execute ``%mesh run`` on the current mesh. Raises: as `run_mesh_cell`."""
    _check_profile(arguments)
    _run(session, session.target((), {}), script, arguments)


def _run(
    session: Session,
    procs: ProcMesh,
    code: str | Script,
    arguments: Arguments,
    line_offset: int = 0,
    debug_name: str = "",
) -> bool:
    """Run a cell or a program, and wait for it or leave it running; returns whether it was left."""
    cell_number = _cell_number(session)
    profile = CellProfile(cell_number, arguments.text(TRACE.name)) if _is_profiled(arguments) else None
    only, out, timeout_s = arguments.text("--only"), arguments.text("--out"), arguments.number("--timeout")
    with contextlib.ExitStack() as holding:
        cell = start(
            session,
            procs,
            code,
            holding,
            cell_number=cell_number,
            line_offset=line_offset,
            group=arguments.text("--group") or "equal",
            only=() if only is None else choose(procs, {RANK: only}).ranks,
            forbid_collectives=arguments.flag("--no-collective"),
            debug_name=debug_name,
            profile=profile,
        )
        is_left = arguments.flag("--async")
        try:
            if not is_left:
                show_time = arguments.flag("--time")
                wait_for(session, cell, holding, out=out, timeout_s=timeout_s, show_time=show_time, profile=profile)
        except CellLeft:
            is_left = True
        if is_left:
            _leave_running(session, cell, arguments)
    return is_left


def _check(arguments: Arguments, code: str) -> None:
    """Refuse options that do not go together, and an empty cell. Raises: UsageError."""
    if not code.strip():
        raise UsageError("the cell is empty: write code below the %%mesh line.")
    if arguments.flag("--setup") and (arguments.flag("--async") or arguments.words):
        other = "--async" if arguments.flag("--async") else "the name of a slice; write its axes"
        raise MESH_CELL.refuse(f"--setup does not go with {other}.", "--setup")
    _check_profile(arguments)


def _check_profile(arguments: Arguments) -> None:
    if _is_profiled(arguments) and arguments.flag("--async"):
        raise arguments.grammar.refuse("--profile does not go with --async.", "--profile")


def _is_profiled(arguments: Arguments) -> bool:
    return arguments.flag("--profile") or arguments.text(TRACE.name) is not None


def run_profiled(session: Session, procs: ProcMesh, code: str, path: str | None) -> None:
    """Execute ``%mesh profile CODE``. path: the file or folder of the trace. Raises: as `run_mesh_cell`."""
    cell_number = _cell_number(session)
    check_syntax(code, cell_number, 0)
    profile = CellProfile(cell_number, path)
    with contextlib.ExitStack() as holding:
        cell = start(session, procs, code, holding, cell_number=cell_number, profile=profile)
        wait_for(session, cell, holding, profile=profile)


def _cell_number(session: Session) -> int:
    return int(session.shell.displayhook.prompt_count)  # right in every IPython; execution_count is not


def start(
    session: Session,
    procs: ProcMesh,
    code: str | Script,
    holding: contextlib.ExitStack,
    *,
    cell_number: int,
    line_offset: int = 0,
    group: str = "equal",
    only: tuple[int, ...] = (),
    forbid_collectives: bool = False,
    debug_name: str = "",
    profile: CellProfile | None = None,
) -> RunningCell:
    """Send the cell, or the program, to the ranks; its output goes to the notebook's running cell.

    holding: from then on it holds interrupts back, so that none is lost before `wait_for`, which closes it.
    """
    output = open_output(session, procs, group=group, what=f"cell {cell_number}", only=only)
    if session.part(WatchedNames).nan:
        watch_modules(procs, True)
    try:
        run: CellRun = start_cell(
            procs,
            code,
            cell_number=cell_number,
            line_offset=line_offset,
            on_output=output.receive,
            forbid_collectives=forbid_collectives,
            debug_name=debug_name,
            profile=profile.name if profile is not None else "",
            holding=holding,
        )
    except WorkerLost as error:
        show_lost(session, error, procs)
        raise
    return RunningCell(session, procs, run, output, f"cell {cell_number}")


def wait_for(
    session: Session,
    cell: RunningCell,
    holding: contextlib.ExitStack,
    *,
    out: str | None = None,
    timeout_s: float | None = None,
    show_time: bool = False,
    profile: CellProfile | None = None,
) -> None:
    """Wait for a cell and keep its result.

    Raises: see `RunningCell.result`; the results of ranks that succeeded are kept.
    """
    session.part(Jobs).foreground.append(cell)
    WatchedCell(cell, session)
    watch_expression(session, cell)
    cell.output.defers_tracebacks = not is_attended(parent_of(session.shell))
    try:
        session.keep_result(cell.result(timeout_s, holding, CellPrompt(session, cell)), out)
    except CallError as error:
        session.keep_result(partial_result(cell.procs, error), out)
        raise
    finally:
        session.part(Jobs).foreground.remove(cell)
        session.errors.note(cell.procs.name, cell.what, cell.failures, cell.succeeded)
        if show_time and (times := times_of(cell.run)):
            sink = sink_for(session.shell)
            sink.stream("stdout", f"{headline(times)}\n")
            if len(times) > 1:
                show_tables(sink, charts(times), chart(times))
        if profile is not None:
            profile.finish(cell, sink_for(session.shell))


def partial_result(procs: ProcMesh, error: CallError) -> ValueMesh[object] | None:
    """Return the ValueMesh of the ranks that succeeded; None where none did."""
    partial = error.partial
    ranks = [rank for rank in procs.ranks if rank in partial]
    if not ranks:
        return None
    return ValueMesh.lazy(members_of(procs.select(ranks)), partial.__getitem__)


def _leave_running(session: Session, cell: RunningCell, arguments: Arguments) -> None:
    job = session.part(Jobs).add(cell, cell.procs.name)
    print(f"job {job.number} runs on {name_ranks(cell.ranks)}; wait for it: %mesh wait {job.number}")
    follow(session, job, arguments.text("--out"), show_time=arguments.flag("--time"))
    for listener in session.on_change:
        listener()
    if (timeout_s := arguments.number("--timeout")) is not None:
        session.publisher.schedule(_Deadline(job, timeout_s), time.monotonic() + timeout_s)


def follow(session: Session, job: Job, out: str | None = None, *, show_time: bool = False) -> None:
    """Keep the result of a job and report its end in the output of its cell."""
    WatchedCell(job.cell, session, f"%mesh cancel {job.number}")
    job.cell.output.summary_follows = False
    watch_expression(session, job.cell)

    def on_end(_future: object) -> None:  # on the thread that completes the future, where nothing may wait
        try:
            _tell_of_end(session, job, out, show_time)
        finally:
            job.told.set()

    job.cell.run.future.add_done_callback(on_end)


def _tell_of_end(session: Session, job: Job, out: str | None, show_time: bool) -> None:
    job.ended = time.monotonic()
    job.cell.conclude()
    session.errors.note(job.mesh, job.cell.what, job.cell.failures, job.cell.succeeded)
    future = job.cell.run.future
    error = future.exception(0)
    if error is None:
        session.keep_result(future.result(0), out)
    why = f": {error}" if isinstance(error, MeshError) and not isinstance(error, CallFailed) else ""
    if isinstance(error, CallFailed) and job.state == "failed":
        why = f": {brief(error)[0].removeprefix('CallFailed: ')}"
    freed = [f"\n{line}" for line in verdict(error)] if isinstance(error, CallFailed) else []
    text = f"job {job.number} {job.state} after {format_seconds(job.duration_s)}{why}{''.join(freed)}"
    job.cell.output.note(text, NEWS if error is None else FAILURE if job.state == "failed" else NOTICE)
    if show_time and (times := times_of(job.cell.run)):
        job.cell.output.note(f"{headline(times)}\n{chart(times)}".rstrip("\n"), "stdout")


def watch_expression(session: Session, cell: RunningCell) -> None:
    """Draw the curve of the expression that `%mesh watch --eval` names, if there is one, while a cell runs."""
    if (watch := session.part(WatchedNames)).expression:
        WatchedExpression(cell, watch, session.publisher)


REPORTING = ("%mesh wait", "%mesh jobs", "%mesh output")
"""The commands that report on jobs and output themselves; no news stands above their cells."""


def tell_news(session: Session, info: ExecutionInfo) -> None:
    """Print, before a cell, the jobs that have ended, and the cells whose output this page has missed."""
    if not (page := page_of(session)):
        return
    ended, unseen = session.part(Jobs).news(), session.part(Transcripts).unseen_by(page)
    if any(command in str(info.raw_cell) for command in REPORTING):
        return
    for job in ended:
        print(job.describe_end())
    for each in unseen:
        lines = count(each.lines, "line") if each.lines else "output"
        print(f"{each.what} wrote {lines} for a page that has gone: %mesh output {each.what.removeprefix('cell ')}")
    if ended or unseen:
        sys.stdout.flush()  # the output of ranks comes by another road


class _Deadline(Scheduled):
    """The deadline of a job, which the publisher's thread watches."""

    def __init__(self, job: Job, timeout_s: float) -> None:
        self._job, self._timeout_s = job, timeout_s
        self._clock = states.stopped_ranks(job.cell.procs).clock
        self._until = self._clock() + timeout_s

    def pump(self, now: float) -> float | None:
        """Interrupt the job at its deadline, which time at a prompt puts off."""
        job, left_s = self._job, self._until - self._clock()
        if job.ended is None and left_s > 0.01:
            return now + max(left_s, 0.1)
        if job.ended is None:
            job.cell.output.note(f"job {job.number} took more than {self._timeout_s:g} s and is interrupted")
            job.cell.run.cancel()
        return None


def _lines_above(whole: str, code: str) -> int:
    """Count the lines of the notebook's cell above ``code``: the magic's own and blank ones; none in auto mode."""
    whole, body = whole.rstrip("\n"), code.rstrip("\n")
    return whole[: len(whole) - len(body)].count("\n") if whole.endswith(body) else 1
