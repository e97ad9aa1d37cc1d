"""Which job a project uses: its name in a file beside the program, so that no program has to say it."""

from __future__ import annotations

import importlib
from pathlib import Path

from meshbook.errors import UsageError
from meshbook.mesh.host_mesh import HostMesh
from meshbook.mesh.job_trait import DEFAULT_JOB_PATH, JobTrait
from meshbook.mesh.jobs import ProcessJob

HOSTS_OF_NO_JOB = 2
"""So many hosts of this machine stand in for those of a project that has no job."""

_standing_in: dict[str, ProcessJob] = {}


def _spec_file() -> Path:
    return Path(DEFAULT_JOB_PATH).parent / "spec"


def set_current_job(module_path: str) -> None:
    """Have the job that a module calls so be the one of this folder: ``set_current_job("jobs.big")``.

    Raises: UsageError for what is no module and name; then nothing is written. The module is imported when it is used.
    """
    if not all(part.isidentifier() for part in module_path.split(".")) or "." not in module_path:
        raise UsageError(f'name a module and a job in it, as in "jobs.big", not {module_path!r}.')
    _spec_file().parent.mkdir(exist_ok=True)
    _spec_file().write_text(module_path)


def load_current_job() -> JobTrait:
    """The job of this folder, as its module has made it.

    Raises: FileNotFoundError where `set_current_job` was not called here; ImportError, AttributeError; TypeError for
    what is no job.
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
