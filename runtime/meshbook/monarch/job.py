"""Monarch's names for hosts that are started together: ``from meshbook.monarch.job import SSHJob``.

A module of its own because programs import it by this name, as they import ``monarch.job``.
"""

from __future__ import annotations

from meshbook.mesh.engine_jobs import ImageSpec, KubernetesJob, RayJob, SlurmJob, SSHJob
from meshbook.mesh.jobs import (
    DEFAULT_JOB_PATH,
    JobState,
    JobTrait,
    LocalJob,
    ProcessJob,
    hosts_from_config,
    job_load,
    job_loads,
    load_current_job,
    set_current_job,
)
from meshbook.monarch import refuse_worker_loop

__all__ = [
    "DEFAULT_JOB_PATH", "ImageSpec", "JobState", "JobTrait", "KubernetesJob", "LocalJob", "ProcessJob", "RayJob",
    "SSHJob", "SlurmJob", "hosts_from_config", "job_load", "job_loads", "load_current_job", "set_current_job",
]  # fmt: skip


def __getattr__(name: str) -> object:
    if name in ("LoginJob", "ProcessState"):
        refuse_worker_loop(name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
