"""Jobs of batch schedulers, by Parsl's providers: submitted, looked at by a thread of its own, cancelled."""

from __future__ import annotations

import contextlib
import importlib.util
import inspect
import logging
import re
import shlex
import threading
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple, get_type_hints

from meshbook.errors import SpawnError, UsageError
from meshbook.formatting import did_you_mean
from meshbook.launchers.engines.commands import program_of

ANSWER_S = 15
"""The time that commands of a scheduler may take."""
LOOK_S = 3.0
"""The pause between two questions to the scheduler about its jobs."""
FIRST_LOOK_S = 0.5


class Scheduler(NamedTuple):
    """title: its name for people. provider: Parsl's class. program: the command that submits.

    limits: whether a job has a time limit, which Parsl makes some minutes unless it is said.
    """

    title: str
    provider: str
    program: str
    limits: bool = True


SCHEDULERS = {
    "pbs": Scheduler("PBS", "PBSProProvider", "qsub"),
    "torque": Scheduler("Torque", "TorqueProvider", "qsub"),
    "lsf": Scheduler("LSF", "LSFProvider", "bsub"),
    "sge": Scheduler("Grid Engine", "GridEngineProvider", "qsub"),
    "condor": Scheduler("HTCondor", "CondorProvider", "condor_submit", limits=False),
    "slurm": Scheduler("Slurm", "SlurmProvider", "sbatch"),
}

_OURS = ("self", "nodes_per_block", "init_blocks", "min_blocks", "max_blocks", "parallelism", "launcher", "cmd_timeout")
"""Parameters of providers that are not for people: a job is a host."""


class QueueState(NamedTuple):
    """waits: the reason why a job waits. ended: the scheduler's text on a job that has ended. Empty where not so."""

    waits: str = ""
    ended: str = ""
    is_queued: bool = False
    """Whether the scheduler has put a job that ran back into its queue."""


class BatchQueue:
    """The jobs of one scheduler that were asked for with the same options."""

    def __init__(self, scheduler: str, options: Sequence[str]) -> None:
        """Raises: SpawnError, UsageError."""
        self.scheduler = SCHEDULERS[scheduler]
        self._provider = _provider(scheduler, read_options(options))
        self._lock = threading.Lock()
        """Providers are for one thread."""
        self._states: dict[str, QueueState] = {}
        self._have_run: set[str] = set()
        self._looks = threading.Condition()
        self._thread: threading.Thread | None = None

    def submit(self, command: str, folder: Path, name: str) -> str:
        """Submit a job; returns its number. folder: the place of the job's files.

        Raises: SpawnError, with the scheduler's words.
        """
        program_of(self.scheduler.title, self.scheduler.program)
        if shlex.quote(str(folder)) != str(folder):
            raise SpawnError(
                f"Parsl puts the path of the folder of logs unquoted into the command {self.scheduler.program}, which "
                f"would take {folder} apart. Set XDG_STATE_HOME to a folder without spaces in its path"
            )
        with self._lock, _said() as said:
            self._provider.script_dir = str(folder)
            try:
                job = self._provider.submit(command, 1, name)
            except Exception as error:
                raise SpawnError(f"{self.scheduler.title} took no job: {_words_of(error)}") from error
        if not job:
            raise SpawnError(f"{self.scheduler.title} took no job: {' '.join(said) or 'it has not said why'}")
        self.expect(str(job))
        return str(job)

    def expect(self, job: str) -> None:
        """Ask for the state of a job from now on; it may be a former controller's."""
        from parsl.jobs.states import JobState as State
        from parsl.jobs.states import JobStatus

        with self._lock:
            status = JobStatus(State.PENDING)
            files = {"job_stdout_path": None, "job_stderr_path": None}
            self._provider.resources.setdefault(job, {"job_id": job, "status": status, **files})
        with self._looks:
            self._states.setdefault(job, QueueState(waits=f"job {job} of {self.scheduler.title} was submitted"))
            if self._thread is None:
                self._thread = threading.Thread(target=self._look, name="batch queue", daemon=True)
                self._thread.start()

    def state(self, job: str) -> QueueState:
        """Return the state of a job when the scheduler was last asked."""
        return self._states.get(job, QueueState())

    def look_at(self, job: str) -> QueueState:
        """Ask the scheduler for the state of a job."""
        return self._ask([job]).get(job, QueueState())

    def cancel(self, job: str) -> None:
        """Have the scheduler end a job. Raises nothing: a job that stays ends with its lease and its time limit."""
        with self._lock, _said(), contextlib.suppress(Exception):
            self._provider.cancel([job])

    def forget(self, job: str) -> None:
        """Ask no more for the state of a job; the thread ends with the last one."""
        with self._looks:
            self._states.pop(job, None)
            self._have_run.discard(job)
            self._looks.notify()

    def _look(self) -> None:
        pause_s = FIRST_LOOK_S
        suspects = set[str]()  # ended, as it seems: once may be wrong, as where Parsl takes a transfer for a failure
        while True:
            with self._looks:
                self._looks.wait_for(lambda: not self._states, pause_s)
                jobs = [job for job, state in self._states.items() if not state.ended]
                if not self._states:
                    self._thread = None
                    return
            pause_s = min(2 * pause_s, LOOK_S)
            states = self._ask(jobs)
            with self._looks:
                self._states.update({job: state for job, state in states.items() if job in self._states})
                suspects = {job for job, state in states.items() if state.ended} - suspects
                self._states.update(dict.fromkeys(suspects & self._states.keys(), QueueState()))

    def _ask(self, jobs: list[str]) -> dict[str, QueueState]:
        """Ask for the states of jobs; that of a scheduler which does not answer says so."""
        with self._lock, _said():
            try:
                statuses = self._provider.status(jobs) if jobs else []
                return {job: self._describe(job, status) for job, status in zip(jobs, statuses, strict=True)}
            except Exception as error:  # the next look is soon, and agents tell of themselves
                return dict.fromkeys(jobs, QueueState(waits=f"{self.scheduler.title} does not answer: {error}"))

    def _describe(self, job: str, status: Any) -> QueueState:
        state, words = status.state.name.lower(), f" ({status.message})" if status.message else ""
        if status.terminal:
            limit = getattr(self._provider, "walltime", "")
            how = f": {state}{words}" if state != "completed" else f"; its time limit is {limit}" if limit else ""
            return QueueState(ended=f"its job {job} of {self.scheduler.title} has ended{how}")
        if state == "running":
            self._have_run.add(job)
            return QueueState()
        if job in self._have_run:
            why = f"its job {job} of {self.scheduler.title} was requeued, and is {state}{words}"
            return QueueState(ended=why, is_queued=True)
        return QueueState(waits=f"job {job} of {self.scheduler.title} is {state}{words}")


def _words_of(error: Exception) -> str:
    """Return the scheduler's own words, where Parsl passes them on."""
    _, _, said = str(error).partition("stderr=")
    return "; ".join(line.strip() for line in (said or str(error)).splitlines() if line.strip())


_queues: dict[tuple[str, tuple[str, ...]], BatchQueue] = {}


def queue_of(scheduler: str, options: Sequence[str]) -> BatchQueue:
    """Return this process's queue of the scheduler with these options. Raises: SpawnError, UsageError."""
    key = (scheduler, tuple(options))
    if key not in _queues:
        _queues[key] = BatchQueue(*key)
    return _queues[key]


def read_options(options: Sequence[str]) -> dict[str, str]:
    """Return ``--name value`` and ``--name=value`` by the names of parameters. Raises: UsageError."""
    found: dict[str, str] = {}
    words = iter(options)
    for word in words:
        name, equals, value = word.partition("=")
        if not name.startswith("--"):
            raise UsageError(f'options of a batch scheduler are --NAME VALUE, but got "{word}".')
        if not equals and (following := next(words, None)) is not None:
            value, equals = following, "="
        if not equals:
            raise UsageError(f"{name} needs a value.")
        found[name[2:].replace("-", "_")] = value
    return found


def _provider(scheduler: str, given: dict[str, str]) -> Any:
    """Return Parsl's provider for jobs of one process each. Raises: SpawnError, UsageError."""
    title, provider, _, limits = SCHEDULERS[scheduler]
    if importlib.util.find_spec("parsl") is None:
        raise SpawnError("Parsl is not installed for the notebook's Python; install it: pip install 'meshbook[batch]'")
    forgotten = UsageError(f"say how long hosts of {title} may run, as in -- --walltime 4:00:00")
    if limits and not given:  # first: its import takes seconds
        raise forgotten
    import parsl.providers
    from parsl.launchers import SimpleLauncher

    made = getattr(parsl.providers, provider)
    known = inspect.signature(made.__init__).parameters
    hints = get_type_hints(made.__init__)
    names = [name for name in known if name not in _OURS and not re.search("Dict|List", str(hints.get(name)))]
    values: dict[str, Any] = {}
    for name, text in given.items():
        if name not in names:
            options = list(map(_option, names))
            there = did_you_mean(_option(name), options) or f" There is: {', '.join(options)}."
            raise UsageError(f"{title} has no option {_option(name)}.{there}")
        values[name] = _converted(name, text, str(hints.get(name, "")) or type(known[name].default).__name__)
    if limits and "walltime" not in given:
        raise forgotten
    return made(**values, init_blocks=0, max_blocks=1, cmd_timeout=ANSWER_S, launcher=SimpleLauncher())


def _option(name: str) -> str:
    return f"--{name.replace('_', '-')}"


def _converted(name: str, text: str, type_name: str) -> object:
    """A value of a parameter, of the type that it says. Raises: UsageError."""
    kind = "true or false" if "bool" in type_name else "a number"
    try:
        if "bool" in type_name:
            return {"true": True, "false": False}[text.lower()]
        if "int" in type_name:
            return int(text)
        return float(text) if "float" in type_name else text
    except (KeyError, ValueError):
        raise UsageError(f'{_option(name)} takes {kind}, not "{text}".') from None


@contextlib.contextmanager
def _said() -> Iterator[list[str]]:
    """Collect the errors that Parsl logs meanwhile: the words of the scheduler, which are nowhere else."""

    class Handler(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            said.append(" ".join(record.getMessage().split()))

    said: list[str] = []
    handler, logger = Handler(logging.ERROR), logging.getLogger("parsl")
    logger.addHandler(handler)
    try:
        yield said
    finally:
        logger.removeHandler(handler)
