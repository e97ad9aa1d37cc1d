"""Host agents by batch schedulers - PBS, Torque, LSF, Grid Engine, HTCondor, Slurm by sbatch -, one job for each host.

    controller ──Parsl's provider: qsub──> scheduler ══> job on a node: sh ──> agent
        │── folder of logs, shared: script and ticket, mode 0600 ────┘           │
        '── own address: port <══════════════ network ═══════════════════════════'

How each scheduler is spoken to is known to Parsl (`meshbook.launchers.engines.batch_queue`). A job for each host,
rather than one with many nodes: no scheduler has to start processes on further nodes, hosts arrive as they are granted,
a lost one comes back by another job, and more may be asked for. The ticket lies in a file that only its user can read,
until the agent has it; the script's output lies beside it and says how the agent has ended. Jobs outlive the
controller, as agents do; the next one knows them by their numbers.
"""

from __future__ import annotations

import contextlib
import re
import shlex
from collections.abc import Sequence
from pathlib import Path

import msgspec

from meshbook.errors import UsageError
from meshbook.formatting import did_you_mean
from meshbook.launchers.agent_start import PYTHON_HINTS, agent_script, with_words
from meshbook.launchers.base import EngineLauncher, LaunchedHost, Launcher
from meshbook.launchers.engines.batch_queue import SCHEDULERS, BatchQueue, queue_of, read_options
from meshbook.launchers.engines.clients import ENDED, ON, wait_for_end
from meshbook.launchers.registry import Asked
from meshbook.sessions.folder import SavedHost, SavedLauncher
from meshbook.system.processes import describe_shell_exit
from meshbook.system.user_folders import write_private
from meshbook.wire.ticket import Ticket, elsewhere, encode_ticket

_NO_FOLDER = "meshbook: no folder"
_AGAIN = "the scheduler has requeued the job: its ticket was used, and heal submits another"

_HINTS = (
    *PYTHON_HINTS,
    (_NO_FOLDER, "The folder of logs must be shared with the nodes: set XDG_STATE_HOME to one that is"),
)

_JOB = """
if test -r {script}; then exec sh {script} >>{log} 2>&1 </dev/null; fi
echo "{no_folder} {folder} on $(uname -n)" >&2
exit 66
"""
"""The job that the scheduler runs."""

_SCRIPT = """
echo "{on}$(uname -n)"
t=$(cat {ticket} 2>/dev/null) && rm -f {ticket} || {{ echo "{again}"; exit 66; }}
printf '%s\\n' "$t" | ({agent})
echo "{ended}$?"
"""


class BatchLauncher(EngineLauncher["BatchHost"]):
    """An agent on each of some nodes, each by a job of its own."""

    name = "batch"

    def __init__(self, scheduler: str, *, python: str | None = None, options: Sequence[str] = ()) -> None:
        """scheduler: one of `SCHEDULERS`. options: ``--walltime 4:00:00``, ``--queue gpu``: of Parsl's provider for it.

        python: the interpreter there; by default the path of our own where there is one, else ``python3``.
        Raises: UsageError.
        """
        if scheduler not in SCHEDULERS:
            got = f'{did_you_mean(scheduler, tuple(SCHEDULERS))} There is no "{scheduler}".' if scheduler else ""
            raise UsageError(f"batch needs a scheduler: {', '.join(f'batch:{each}' for each in SCHEDULERS)}.{got}")
        super().__init__(python, options)
        self.scheduler = scheduler
        read_options(self.options)

    @property
    def named(self) -> tuple[str, ...]:
        return (self.scheduler,)

    def _start(self, tickets: list[Ticket]) -> list[BatchHost]:
        """Submit a job for each; the agents come when they run. Raises: OSError, SpawnError, UsageError."""
        queue = queue_of(self.scheduler, self.options)
        hosts: list[BatchHost] = []
        try:
            for ticket in tickets:
                files = BatchFiles(Path(ticket.log_dir), ticket.host_id)
                files.write(ticket, agent_script(self.python))
                hosts.append(BatchHost(queue, files, ""))
                hosts[-1].job = queue.submit(files.command, files.folder, ticket.host_id)
        except BaseException:
            for host in hosts:
                host.close(0.0)
            raise
        return hosts


class BatchHost:
    """An agent that is a job. job: its number; empty until it has one."""

    pid = started = 0

    def __init__(self, queue: BatchQueue, files: BatchFiles, job: str) -> None:
        self._queue, self._files, self.job = queue, files, job
        if job:
            queue.expect(job)

    def save(self, saved: SavedLauncher) -> SavedLauncher:
        return msgspec.structs.replace(saved, job=self.job)

    def failure(self) -> str | None:
        state = self._queue.state(self.job)  # first: when it has ended, the log is whole
        return self._files.why_ended() or (state.ended and self._files.with_words(state.ended)) or None

    def waits_for(self) -> str:
        """Return the state of the job in the queue; empty where it waits for nothing."""
        return "" if self._files.why_ended() else self._queue.state(self.job).waits

    def close(self, timeout_s: float) -> None:
        """Wait for the agent, which was told, and cancel the job of one that does not end or has not begun."""
        if self.job and self._files.node:
            wait_for_end(self.failure, timeout_s)
        if self.job and (self.failure() is None or self._is_queued_again()):
            self._queue.cancel(self.job)
        self._queue.forget(self.job)
        self._files.remove()

    def _is_queued_again(self) -> bool:
        """Whether the scheduler has ended the job, and the agent with it, and has put it back into its queue."""
        if self._files.exit_code in ("", "0"):
            return self._queue.state(self.job).is_queued
        state = self._queue.look_at(self.job)
        return state.is_queued or bool(state.waits)

    def release(self) -> None:
        """It lives on by itself."""


def parse(asked: Asked) -> BatchLauncher:
    return BatchLauncher(asked.named, python=asked.python, options=asked.options)


def find(id: str, saved: SavedHost, logs: Path) -> tuple[LaunchedHost, Launcher]:
    scheduler, *options = saved.launcher.options
    host = BatchHost(queue_of(scheduler, options), BatchFiles(logs, id), saved.launcher.job)
    return host, BatchLauncher(scheduler, python=saved.launcher.python, options=options).in_place_of(host)


class BatchFiles:
    """The files of a job in the folder of logs, which is shared with the nodes."""

    def __init__(self, folder: Path, host_id: str) -> None:
        self.folder, self._id = folder, host_id
        self.log, self._ticket, self._script = (
            folder / f"agent-{host_id}{suffix}" for suffix in (".log", ".ticket", ".sh")
        )

    @property
    def command(self) -> str:
        return _JOB.format(
            script=shlex.quote(str(self._script)),
            log=shlex.quote(str(self.log)),
            folder=self.folder,
            no_folder=_NO_FOLDER,
        )

    def script(self, agent: str) -> str:
        """Return the script that the job runs where the folder is there. agent: the script that runs the agent."""
        ticket = shlex.quote(str(self._ticket))
        return _SCRIPT.format(on=ON, ended=ENDED, again=_AGAIN, ticket=ticket, agent=agent)

    def write(self, ticket: Ticket, agent: str) -> None:
        """Write the script and the ticket. Raises: OSError."""
        write_private(self._script, self.script(agent).encode())
        write_private(self._ticket, encode_ticket(elsewhere(ticket)) + b"\n")

    @property
    def node(self) -> str:
        """The name of the machine on which the job runs, by its own account; empty until it has said so."""
        return self._told(ON)

    @property
    def exit_code(self) -> str:
        """The exit code of the agent; empty while the job has not said it."""
        return self._told(ENDED)

    def why_ended(self) -> str:
        """Return how the agent has ended; empty while the job has not said so."""
        if not (code := self.exit_code):
            return ""
        return self.with_words(f"its agent on {self.node} ended ({describe_shell_exit(int(code))})")

    def with_words(self, what: str) -> str:
        """Add the last lines of the job, from our log or the scheduler's, and advice."""
        theirs = [line for path in self._theirs() if "err" in path.name for line in _read(path)]
        lines = [line for line in [*theirs, *self._lines()] if not line.startswith((ON, ENDED))]
        return with_words(what, lines, _HINTS)

    def remove(self) -> None:
        """Remove all files but the log."""
        for path in (self._ticket, self._script, *self._theirs()):
            with contextlib.suppress(OSError):
                path.unlink()

    def _theirs(self) -> list[Path]:
        """List the scheduler's scripts and output, under names that Parsl makes of the host's."""
        return sorted(path for path in self.folder.glob(f"*{self._id}.*") if not path.name.startswith("agent-"))

    def _lines(self) -> list[str]:
        return _read(self.log)

    def _told(self, mark: str) -> str:
        """Return the rest of the line that begins with a mark of our scripts; empty while there is none."""
        return next((line.removeprefix(mark) for line in self._lines() if line.startswith(mark)), "")


def _read(path: Path) -> list[str]:
    """Return the lines of a file that are not empty; none where there is no such file yet."""
    try:
        return [line.strip() for line in re.split(r"[\r\n]+", path.read_text(errors="replace")) if line.strip()]
    except OSError:
        return []
