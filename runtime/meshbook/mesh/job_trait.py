"""What a job is: hosts by name, each a HostMesh, which may be kept in a file. Programs can write jobs of their own."""

from __future__ import annotations

import os
import pickle
import uuid
from abc import ABC, abstractmethod
from collections.abc import Mapping
from pathlib import Path

from meshbook.errors import UsageError
from meshbook.formatting import did_you_mean
from meshbook.mesh.host_mesh import HostMesh
from meshbook.system.user_folders import write_private

DEFAULT_JOB_PATH = ".monarch/job_state.pkl"
"""Where Monarch keeps a job unless it is told otherwise; here a job is kept where it is asked for."""

BATCH_JOB = "MESHBOOK_BATCH_JOB"
"""In the environment of a script that a job runs: the file of that job."""


_NO_TELEMETRY = (
    "jobs have no telemetry of their own. The health widget, procs.status() and procs.stacks() show what ranks do; a "
    "program that measures more uses OpenTelemetry itself."
)
_NOT_HERE = {
    "enable_telemetry": _NO_TELEMETRY,
    "enable_admin": _NO_TELEMETRY,
    "telemetry_query_client": _NO_TELEMETRY,
    "profile": "torch.profiler on the ranks shows what they do, in a notebook by the magic profile.",
    "remote_mount": "folders are not mounted on hosts: procs.sync_workspace() sends Python modules, and keeps them in "
    "step; other files go by a file system that the hosts share, or by procs.push().",
    "gather_mount": "folders of hosts are not mounted here: read files on the ranks, and procs.pull() their text.",
}
"""By what Monarch's jobs have: what there is in its place."""


class JobState:
    """The hosts of a job: ``state.trainers`` is the HostMesh of that name."""

    query_engine: None = None
    query_engine_client: None = None
    telemetry_url: None = None
    dashboard_url: None = None
    admin_url: None = None
    """There is no telemetry beside the session's own: the health widget, ``procs.status()``, OpenTelemetry."""

    def __init__(self, hosts: Mapping[str, HostMesh]) -> None:
        self._hosts = dict(hosts)

    def __getattr__(self, name: str) -> HostMesh:
        if name.startswith("_") or name not in self._hosts:
            names = list(self._hosts) if not name.startswith("_") else []
            raise AttributeError(
                f'the job has no hosts "{name}"; it has {", ".join(names)}.{did_you_mean(name, names)}'
            )
        return self._hosts[name]

    def __dir__(self) -> list[str]:
        return sorted({*super().__dir__(), *self._hosts})

    def __repr__(self) -> str:
        return f"JobState({', '.join(f'{name}={hosts!r}' for name, hosts in self._hosts.items())})"


class JobTrait(ABC):
    """A job: what it is to have, and once it was applied, its hosts.

    A subclass says how: `_create`, `_state`, `_kill` and `can_run`. It can be pickled.
    """

    def __init__(self) -> None:
        self._apply_id: str | None = None
        self._in_file: JobTrait | None = None
        """The job that was found in a file and runs what this one asks for."""

    @property
    def _running(self) -> JobTrait | None:
        job = self._in_file or self
        return job if job._apply_id is not None else None

    @property
    def active(self) -> bool:
        """Whether it was applied, and not ended since."""
        return self._running is not None

    @property
    def apply_id(self) -> str | None:
        """A name for what `apply` has started, another one each time; None before."""
        running = self._running
        return running._apply_id if running is not None else None

    def apply(self, client_script: str | None = None) -> None:
        """Start the hosts, unless they are there. Raises: SpawnError; then none of them is left.

        client_script: runs where the job's hosts are, and drives them (`LocalJob.apply`); other jobs refuse it.
        """
        if self._running is None:
            self._create(client_script)
            self._apply_id = str(uuid.uuid4())

    def state(self, cached_path: str | Path | None = None) -> JobState:
        """The hosts, started where they are not there; a lost one is started again in its place. Raises: SpawnError.

        cached_path: a file for the job. A job that is kept there and can run this one is taken in its place, another
        one is ended. In a script that a job runs (`LocalJob.apply`) the hosts are those of that job, whatever this one
        asks for. Raises: UsageError for a file that holds no job.
        """
        if (batch := os.environ.get(BATCH_JOB)) and self._running is None:
            self._in_file = job_load(batch)
            self._in_file.apply()
        if self._running is None and cached_path is not None:
            self._in_file = self._found_in(Path(cached_path))
        if self._running is None:
            self.apply()
            if cached_path is not None:
                self.dump(cached_path)
        running = self._running
        assert running is not None
        return running._state()

    def _found_in(self, path: Path) -> JobTrait | None:
        """The job in a file, if it runs still, and what this one asks for."""
        try:
            kept = job_load(path)
        except FileNotFoundError:
            return None
        if not kept.active:
            return None
        if kept.can_run(self):
            return kept._running
        kept.kill()
        path.resolve().unlink(missing_ok=True)
        return None

    def dump(self, filename: str | Path) -> None:
        """Keep the job in a file, that of its user alone; where that is a link, what it leads to is written."""
        path = Path(filename).resolve()
        path.parent.mkdir(parents=True, exist_ok=True)
        write_private(path, self.dumps())

    def dumps(self) -> bytes:
        """The job as bytes, for `job_loads`."""
        return pickle.dumps(self)

    def kill(self) -> None:
        """End the hosts, and every mesh on them. Idempotent."""
        running, self._in_file = self._running, None
        self._apply_id = None
        if running is not None:
            running._apply_id = None
            running._kill()

    @abstractmethod
    def can_run(self, spec: JobTrait) -> bool:
        """Whether the hosts that it has are those that ``spec`` asks for."""

    @abstractmethod
    def _create(self, client_script: str | None) -> None:
        """Start the hosts. Raises: SpawnError; then none is left."""

    @abstractmethod
    def _state(self) -> JobState:
        """The hosts that were started."""

    @abstractmethod
    def _kill(self) -> None:
        """End the hosts."""

    def __getattr__(self, name: str) -> object:
        """Raises: UsageError for what is not here, which says what there is; AttributeError."""
        if name in _NOT_HERE:
            raise UsageError(f"{name} is not here: {_NOT_HERE[name]}")
        raise AttributeError(f"{type(self).__name__!r} has no attribute {name!r}")


def job_load(filename: str | Path = DEFAULT_JOB_PATH) -> JobTrait:
    """The job in a file. Files of jobs are code: load your own. Raises: UsageError; FileNotFoundError."""
    path = Path(filename)
    data = path.read_bytes()
    try:
        return job_loads(data)
    except UsageError:
        raise
    except Exception as error:
        why = f"{type(error).__name__}: {error}"
        raise UsageError(f"{path} holds no job that can be read: {why}. Remove it.") from error


def job_loads(data: bytes) -> JobTrait:
    """The job of `JobTrait.dumps`. Raises: UsageError for what is none."""
    job = pickle.loads(data)
    if not isinstance(job, JobTrait):
        raise UsageError(f"that is no job, but a {type(job).__name__}.")
    return job
