"""Monarch's names for hosts that are started together: ``from meshbook.job import SSHJob``.

A module of its own because programs import it by this name, as they import ``monarch.job``.
"""

from __future__ import annotations

from meshbook.mesh.jobs import JobState, JobTrait, LocalJob, ProcessJob, RayJob, SlurmJob, SSHJob
from meshbook.mesh.kubernetes_job import ImageSpec, KubernetesJob

__all__ = [
    "ImageSpec", "JobState", "JobTrait", "KubernetesJob", "LocalJob", "ProcessJob", "RayJob", "SSHJob", "SlurmJob",
]  # fmt: skip
