"""What engines say of jobs of ours is shown in their words, and an engine that is silent keeps nobody waiting."""

from __future__ import annotations

import os
import subprocess
import time
from pathlib import Path

import pytest
from engine_clusters import slurm_cluster
from patience import wait_until

from meshbook import start_hosts
from meshbook.errors import SpawnError
from meshbook.launchers.engines.commands import job_lists
from meshbook.launchers.slurm import SlurmLauncher
from meshbook.system.processes import describe_shell_exit

pytestmark = pytest.mark.cluster


@pytest.fixture(autouse=True)
def nowhere(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """No cluster of Kubernetes is known."""
    monkeypatch.setenv("KUBECONFIG", str(tmp_path / "none"))


def program(folder: Path, name: str, script: str, monkeypatch: pytest.MonkeyPatch) -> None:
    (folder / name).write_text(f"#!/bin/sh\n{script}\n")
    (folder / name).chmod(0o755)
    monkeypatch.setenv("PATH", f"{folder}:{os.environ['PATH']}")


def test_jobs_of_slurm_are_shown_as_squeue_has_them() -> None:
    with slurm_cluster():
        for name in ("meshbook", "another"):
            begin = ["salloc", "--no-shell", "-N1", "--time=5", f"--job-name={name}"]
            subprocess.run(begin, check=True, capture_output=True, timeout=60)
        try:
            head, job = job_lists()
            assert "JOBID" in head and "meshbook" in job
        finally:
            for name in ("meshbook", "another"):
                subprocess.run(["scancel", "-n", name], check=True, timeout=60)
        wait_until(lambda: not list(job_lists()))


def test_all_are_asked_at_once_and_who_does_not_answer_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    program(tmp_path, "squeue", "exec sleep 60", monkeypatch)
    program(tmp_path, "condor_q", "exec sleep 60", monkeypatch)
    program(tmp_path, "bjobs", "echo 'JOBID JOB_NAME'; echo '7 parsl.batch-3.1'; echo '8 mine'", monkeypatch)
    program(tmp_path, "qstat", "echo 'cannot connect to server pbs' >&2; exit 2", monkeypatch)
    began = time.monotonic()
    slurm, pbs, *lsf, condor = job_lists(deadline_s=1.0)
    assert time.monotonic() - began < 20
    assert slurm.startswith("Slurm has not told its jobs: Slurm does not answer")
    assert pbs == "PBS, Torque or Grid Engine has not told its jobs: qstat failed: cannot connect to server pbs"
    assert lsf == ["JOBID JOB_NAME", "7 parsl.batch-3.1"] and condor.startswith("HTCondor has not told its jobs: ")


def test_commands_of_slurm_without_a_cluster_are_no_engine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("squeue", "qstat"):
        program(tmp_path, name, "echo 'fatal: Could not establish a configuration source' >&2; exit 1", monkeypatch)
    assert list(job_lists()) == []
    program(tmp_path, "sinfo", "echo 'fatal: Could not establish a configuration source' >&2; exit 1", monkeypatch)
    with pytest.raises(SpawnError, match="finds no Slurm cluster: there is no slurm"):
        start_hosts({"hosts": 1}, SlurmLauncher())


@pytest.mark.parametrize(
    ("code", "words"),
    [(0, "exit code 0"), (127, "exit code 127"), (137, "SIGKILL"), (255, "exit code 255"), (-9, "SIGKILL")],
)
def test_exit_codes_of_shells(code: int, words: str) -> None:
    assert words in describe_shell_exit(code)
