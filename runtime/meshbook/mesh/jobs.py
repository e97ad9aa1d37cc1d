"""Monarch's jobs: hosts by name, started together, each name a HostMesh. Programs can write jobs of their own.

    job = SSHJob(ssh_args=("-p", "2222"))
    job.add_mesh("trainers", ["nodeA", "nodeB"])
    procs = job.state().trainers.spawn_procs({"gpus": 8})
    job.kill()

The hosts of a job have the axis ``hosts``, and live until `JobTrait.kill` or the end of the program. A job can be kept
in a file (`dump`, ``state(cached_path=...)``): a program that loads it has its hosts as long as their session lives, in
that program, or in one that has left it by `meshbook.detach`.
"""

from __future__ import annotations

import importlib
import os
import pickle
import subprocess
import sys
import tempfile
import uuid
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from meshbook.errors import AttachError, UsageError
from meshbook.formatting import did_you_mean
from meshbook.launchers.base import Launcher
from meshbook.launchers.local import LocalLauncher
from meshbook.mesh.driven import attach, controller_of, start_hosts, this_host
from meshbook.mesh.host_mesh import HostMesh
from meshbook.sessions.listing import sessions
from meshbook.shape.members import Members
from meshbook.system.user_folders import write_private

DEFAULT_JOB_PATH = ".monarch/job_state.pkl"
"""Monarch's default path of a job file; here a job is only kept where a path is given."""

BATCH_JOB = "MESHBOOK_BATCH_JOB"
"""The environment variable that tells a script of a job the path of the job's file."""


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
"""The replacement here for each method of Monarch's jobs that is missing, by its name."""


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
    """A job: the hosts that it asks for, and once it was applied, the hosts that it has.

    A subclass says how: `_create`, `_state`, `_kill` and `can_run`. It can be pickled.
    """

    def __init__(self) -> None:
        self._apply_id: str | None = None
        self._in_file: JobTrait | None = None
        """The job that was found in a file and has the hosts that this one asks for."""

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
        """A name for the hosts that `apply` has started, another one each time; None before."""
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
        one is ended. In a script that a job runs (`LocalJob.apply`) the hosts are those of that job, and this one's
        wishes are ignored. Raises: UsageError for a file that holds no job.
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
        """The job in a file, if it runs still and has the hosts that this one asks for."""
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
        """Keep the job in a file that only its user can read; where that is a link, its target is written."""
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
        """Whether its hosts are the ones that ``spec`` asks for."""

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
        """Raises: UsageError for a name that is missing here, which gives the replacement; AttributeError."""
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
    """Return the job of `JobTrait.dumps`. Raises: UsageError for bytes that hold none."""
    job = pickle.loads(data)
    if not isinstance(job, JobTrait):
        raise UsageError(f"that is no job, but a {type(job).__name__}.")
    return job


SCRIPT_GRACE_S = 5.0
"""A script that was told to end is killed after this time."""
HOSTS = "hosts"
HOSTS_OF_NO_JOB = 2
"""The number of hosts on this machine that stand in for a project without a job."""


class KeptHosts(NamedTuple):
    """The kept members of a session's hosts. hosts: the ids of all hosts; members: the kept ones among them."""

    session: str
    hosts: tuple[str, ...]
    members: Members
    env: Mapping[str, str]
    python: str

    @property
    def live(self) -> bool:
        """Whether they are there: in this process's sessions, or in one that waits to be attached."""
        if (controller := controller_of(self.session)) is not None:
            known = {host.id for host in controller.hosts}
            return known.issuperset(self.hosts)
        return any(known.id == self.session and known.owner_pid is None for known in sessions())

    def find(self) -> HostMesh:
        """The hosts; their session is attached where that must be. Raises: AttachError."""
        controller = controller_of(self.session)
        if controller is None:
            attach(self.session)
            controller = controller_of(self.session)
        known = {host.id: host for host in controller.hosts} if controller is not None else {}
        if controller is None or not known.keys() >= set(self.hosts):
            raise AttachError("the hosts of the job have ended: kill() it, then apply() it again.")
        return HostMesh(controller, [known[id] for id in self.hosts], self.members, self.env, self.python)


class HostsJob(JobTrait):
    """A job whose hosts are started here, by the launchers of `_wanted`; all at once where they are `_together`."""

    _together = False
    _ends_hosts = True
    _env: Mapping[str, str] = {}
    """Environment variables added for processes that are spawned on the hosts."""

    def __init__(self) -> None:
        super().__init__()
        self._hosts: dict[str, HostMesh] | None = None
        self._kept: dict[str, KeptHosts] = {}
        """The hosts of a job that was loaded from a file, by name."""

    @property
    def _running(self) -> JobTrait | None:
        running = super()._running
        if running is self and self._hosts is None and not all(kept.live for kept in self._kept.values()):
            self._apply_id = None
            return None
        return running

    def _create(self, client_script: str | None) -> None:
        if client_script is not None:
            self._run_script(client_script)
            return
        self._hosts = {name: hosts.without_waiting() for name, hosts in self._start().items()}

    def _run_script(self, client_script: str) -> None:
        """Run a script that drives the hosts. Raises: UsageError for jobs that have no batch mode."""
        raise UsageError("only a LocalJob has a batch mode: start the script by itself, and have it apply the job.")

    def _state(self) -> JobState:
        hosts = self._hosts
        if hosts is None:
            hosts = self._hosts = {name: kept.find().without_waiting() for name, kept in self._kept.items()}
        for each in hosts.values():
            each.replace_lost()
        return JobState({name: each.apart() for name, each in hosts.items()})

    def _kill(self) -> None:
        if self._hosts is None:
            self._hosts = {name: kept.find() for name, kept in self._kept.items() if kept.live}
        hosts, self._hosts, self._kept = self._hosts, None, {}
        for each in hosts.values() if self._ends_hosts else ():
            each.end()

    def _check_changeable(self, name: str) -> None:
        """Raises: UsageError once the job was applied."""
        if self.active:
            raise UsageError(f'the job has its hosts already; kill() it, then add "{name}".')

    @abstractmethod
    def _wanted(self) -> dict[str, tuple[int, Launcher]]:
        """Return how many hosts there are to be under each name, and who starts them. Raises: UsageError."""

    @property
    def _spec(self) -> object:
        """The value that is equal for two jobs with the same hosts."""
        wanted = {
            name: [launcher.for_host(index).saved for index in range(count)]
            for name, (count, launcher) in self._wanted().items()
        }
        return wanted, self._env

    def can_run(self, spec: JobTrait) -> bool:
        return isinstance(spec, type(self)) and self.active and spec._spec == self._spec

    def _start(self) -> dict[str, HostMesh]:
        """Start the hosts. Raises: SpawnError; then none is left."""
        wanted = self._wanted()
        if not self._together:
            return {name: hosts.with_environment(self._env) for name, hosts in start_all(wanted).items()}
        _, launcher = next(iter(wanted.values()))
        everything = start_all({HOSTS: (sum(count for count, _ in wanted.values()), launcher)})[HOSTS]
        parts, first = {}, 0
        for name, (count, _) in wanted.items():
            parts[name] = everything.slice(**{HOSTS: slice(first, first + count)}).as_owned()
            first += count
        return parts

    def __getstate__(self) -> dict[str, Any]:
        kept = self._kept
        if self._hosts is not None:
            kept = {name: KeptHosts(*hosts.kept) for name, hosts in self._hosts.items()}
        return {**self.__dict__, "_hosts": None, "_kept": kept}


class LocalJob(HostsJob):
    """This machine under one or several names: a stand-in for a job on others.

    ``apply(client_script="train.py")`` is its batch mode: the script runs in a process of its own, and ``state()`` of
    any job there gives the hosts of this one. `process` is that process; its output is in `log_dir`.
    """

    _ends_hosts = False  # others have meshes there too

    def __init__(self, hosts: Sequence[str] = ("hosts",)) -> None:
        super().__init__()
        self._names = checked_names(hosts)
        self._process: subprocess.Popen[bytes] | None = None
        self._log_dir = ""

    def can_run(self, spec: JobTrait) -> bool:
        return isinstance(spec, LocalJob) and spec._names == self._names

    def _wanted(self) -> dict[str, tuple[int, Launcher]]:
        return {name: (1, LocalLauncher()) for name in self._names}

    def _start(self) -> dict[str, HostMesh]:
        return {name: this_host() for name in self._names}

    def _state(self) -> JobState:
        if self._hosts is None:
            self._create(None)
        return super()._state()

    @property
    def process(self) -> subprocess.Popen[bytes]:
        """The script that runs. Raises: UsageError outside of the batch mode."""
        if self._process is None:
            raise UsageError('the job runs no script: apply(client_script="train.py") does.')
        return self._process

    @property
    def log_dir(self) -> Path:
        """The folder of ``stdout.log``, ``stderr.log`` and the file of the job. Raises: as `process`."""
        _ = self.process
        return Path(self._log_dir)

    def _run_script(self, client_script: str) -> None:
        if not Path(client_script).is_file():
            raise UsageError(f"there is no script {client_script}.")
        folder = Path(tempfile.mkdtemp(prefix="meshbook-job-"))
        kept = folder / "job.pkl"
        self._log_dir = str(folder)
        self.dump(kept)
        with (folder / "stdout.log").open("wb") as out, (folder / "stderr.log").open("wb") as err:
            self._process = subprocess.Popen(
                [sys.executable, client_script], stdout=out, stderr=err, env={**os.environ, BATCH_JOB: str(kept)}
            )

    def _kill(self) -> None:
        """End the script, if one runs."""
        if self._process is not None and self._process.poll() is None:
            self._process.terminate()
            try:
                self._process.wait(SCRIPT_GRACE_S)
            except subprocess.TimeoutExpired:
                self._process.kill()
                self._process.wait()
        super()._kill()

    def __getstate__(self) -> dict[str, Any]:
        # where it is loaded this machine is another, and the script nobody's child
        return {**super().__getstate__(), **dict.fromkeys(("_hosts", "_apply_id", "_process"))}


class ProcessJob(HostsJob):
    """Hosts that are agents on this machine, each as if it were alone there; to try the behaviour of several hosts."""

    def __init__(self, meshes: Mapping[str, int], env: Mapping[str, str] | None = None) -> None:
        """meshes: the number of hosts by name. env: variables added for processes spawned there."""
        super().__init__()
        self._meshes, self._env = checked_counts(meshes), dict(env or {})

    def _wanted(self) -> dict[str, tuple[int, Launcher]]:
        return {name: (count, LocalLauncher(separate_hosts=True)) for name, count in self._meshes.items()}


def start_all(wanted: Mapping[str, tuple[int, Launcher]]) -> dict[str, HostMesh]:
    """Start hosts, so many by each launcher. Raises: SpawnError; then none is left."""
    started: dict[str, HostMesh] = {}
    try:
        for name, (count, launcher) in wanted.items():
            started[name] = start_hosts({HOSTS: count}, launcher)
        for hosts in started.values():
            hosts.await_ready()
    except BaseException:
        for hosts in started.values():
            hosts.end()
        raise
    return started


def checked_counts(meshes: Mapping[str, int]) -> dict[str, int]:
    """Raises: UsageError."""
    checked_names(meshes)
    for name, count in meshes.items():
        if not isinstance(count, int) or count < 1:
            raise UsageError(f'hosts are counted from 1, as in {{"{name}": 2}}, not {count!r}.')
    return dict(meshes)


def checked_names(names: Sequence[str] | Mapping[str, int]) -> tuple[str, ...]:
    """Raises: UsageError."""
    for name in (found := (names,) if isinstance(names, str) else tuple(names)):
        if not isinstance(name, str) or not name.isidentifier() or name.startswith("_"):
            raise UsageError(f"hosts are named by an identifier, as in state.trainers, not {name!r}.")
    if not found:
        raise UsageError("name the hosts of the job.")
    return found


# ---- the job of a folder ----------------------------------------------------------------------------------------

_standing_in: dict[str, ProcessJob] = {}


def _spec_file() -> Path:
    return Path(DEFAULT_JOB_PATH).parent / "spec"


def set_current_job(module_path: str) -> None:
    """Have the job that a module calls so be the one of this folder: ``set_current_job("jobs.big")``.

    Raises: UsageError for a text that is no module and name; then nothing is written. The module is imported when it is
    used.
    """
    if not all(part.isidentifier() for part in module_path.split(".")) or "." not in module_path:
        raise UsageError(f'name a module and a job in it, as in "jobs.big", not {module_path!r}.')
    _spec_file().parent.mkdir(exist_ok=True)
    _spec_file().write_text(module_path)


def load_current_job() -> JobTrait:
    """The job of this folder, as its module has made it.

    Raises: FileNotFoundError where `set_current_job` was not called here; ImportError, AttributeError; TypeError for an
    object that is no job.
    """
    try:
        path = _spec_file().read_text().strip()
    except FileNotFoundError:
        raise FileNotFoundError(f'no job was set in {Path.cwd()}: set_current_job("module.job") does.') from None
    module, _, name = path.rpartition(".")
    job = getattr(importlib.import_module(module), name)
    if not isinstance(job, JobTrait):
        raise TypeError(f"{path} is no job, but a {type(job).__name__}.")
    return job


def hosts_from_config(name: str) -> HostMesh:
    """The hosts of this name of the current job; where there is none, two hosts that are agents of this machine.

    Raises: SpawnError; AttributeError where the job has no hosts of this name.
    """
    try:
        job = load_current_job()
    except FileNotFoundError:
        job = _standing_in.setdefault(name, ProcessJob({name: HOSTS_OF_NO_JOB}))
    found: HostMesh = getattr(job.state(), name)
    return found
