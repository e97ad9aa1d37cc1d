"""Cells that run beside the notebook: jobs, wait, cancel; and interrupt for all that runs."""

from __future__ import annotations

import time

from meshbook.errors import MeshError
from meshbook.wording import name_ranks
from meshbook_extension.commands import command
from meshbook_extension.jobs import Job
from meshbook_extension.labels import format_seconds
from meshbook_extension.options import Arguments, Grammar, Option
from meshbook_extension.running_cell import interrupted
from meshbook_extension.session import Session
from meshbook_extension.waiting import wait_until_done


@command(Grammar(name="%mesh jobs", summary="Cells that were started with --async.", examples=("%mesh jobs",)))
def list_jobs(session: Session, arguments: Arguments) -> None:
    """One line each."""
    jobs = session.jobs.all()
    print("\n".join(job.describe() for job in jobs) or "no job yet. Start one: %%mesh --async above a cell")


@command(
    Grammar(
        name="%mesh wait",
        summary="Wait for a job, or for all; fails as the job did. An interrupt ends the wait, not the job.",
        words="[ID]",
        count=(0, 1),
        options=(Option("--timeout", "wait so many seconds at most", float, "S"),),
        examples=("%mesh wait 1", "%mesh wait", "%mesh wait 1 --timeout 60"),
    )
)
def wait(session: Session, arguments: Arguments) -> None:
    """Wait, then say how it ended."""
    jobs = [session.jobs.find(word) for word in arguments.words] or session.jobs.running()
    timeout_s = arguments.number("--timeout")
    deadline = None if timeout_s is None else time.monotonic() + timeout_s
    if not jobs:
        print("no job is running")
    errors: list[MeshError] = []
    for job in jobs:
        if not _wait_for(job, None if deadline is None else max(0.0, deadline - time.monotonic())):
            print(f"{job.describe()}\n  wait on: %mesh wait {job.number}    end it: %mesh cancel {job.number}")
            continue
        try:
            job.cell.outcome()
        except MeshError as error:
            errors.append(error)
        print(f"job {job.number} {job.state} after {format_seconds(job.duration_s)}")
    if errors:
        raise errors[0]


def _wait_for(job: Job, timeout_s: float | None) -> bool:
    try:
        return wait_until_done(job.cell.run.future, timeout_s)
    except KeyboardInterrupt:
        raise interrupted(f"job {job.number} runs on; end it: %mesh cancel {job.number}") from None


@command(
    Grammar(
        name="%mesh cancel",
        summary="Interrupt a job on its ranks.",
        words="ID",
        count=(1, 1),
        examples=("%mesh cancel 1",),
    )
)
def cancel(session: Session, arguments: Arguments) -> None:
    """Interrupt it and say who obeyed."""
    job = session.jobs.find(arguments.words[0])
    if job.state != "running":
        print(f"job {job.number} has ended: {job.state} after {format_seconds(job.duration_s)}")
        return
    print(f"job {job.number} {job.cell.interrupt()}")


@command(
    Grammar(
        name="%mesh interrupt",
        summary="Interrupt every cell that runs on a mesh, jobs too; for a front end that can send it meanwhile.",
        examples=("%mesh interrupt",),
    )
)
def interrupt(session: Session, arguments: Arguments) -> None:
    """Interrupt all."""
    cells = [*session.foreground, *(job.cell for job in session.jobs.running())]
    for cell in cells:
        cell.run.cancel()
    ranks = {rank for cell in cells for rank in cell.waiting}
    print(f"interrupted {name_ranks(ranks)}" if ranks else "no cell is running")
