"""What engines hold for this user is found, whoever asked for it, and an engine that is silent keeps nobody waiting."""

from __future__ import annotations

import os
import subprocess
import time
from pathlib import Path

import pytest
from patience import wait_until
from ray_cluster import ray_cluster
from slurm_cluster import slurm_cluster

from meshbook import shutdown, start_hosts
from meshbook.errors import SpawnError
from meshbook.launchers.engines.own_jobs import JobSearch
from meshbook.launchers.k8s import KubernetesLauncher
from meshbook.launchers.ray import RayLauncher
from meshbook.launchers.slurm import SlurmLauncher
from meshbook.system.processes import describe_shell_exit

pytestmark = pytest.mark.cluster


@pytest.fixture(autouse=True)
def nowhere(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """No engine is here but those of a test."""
    monkeypatch.setenv("KUBECONFIG", str(tmp_path / "none"))
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    monkeypatch.setattr("meshbook.launchers.engines.own_jobs._RAY_CURRENT", tmp_path / "none")


def program(folder: Path, name: str, script: str, monkeypatch: pytest.MonkeyPatch) -> None:
    (folder / name).write_text(f"#!/bin/sh\n{script}\n")
    (folder / name).chmod(0o755)
    monkeypatch.setenv("PATH", f"{folder}:{os.environ['PATH']}")


def test_jobs_of_slurm_are_found_by_what_asked_for_them() -> None:
    with pytest.MonkeyPatch.context() as patch, slurm_cluster(patch):
        begin = ["salloc", "--no-shell", "-N2", "--time=5", "--job-name=meshbook"]
        subprocess.run(begin, check=True, capture_output=True, timeout=60)
        try:
            (job,), silent = JobSearch().results()
            assert silent == [] and job.engine == "Slurm" and job.state == "running" and job.hosts == 2
            assert job.age_s is not None and job.where and job.end == f"scancel {job.number}"
        finally:
            subprocess.run(["scancel", "-n", "meshbook"], check=True, timeout=60)
        wait_until(lambda: JobSearch().results() == ([], []))


def test_an_engine_that_does_not_answer_is_named_in_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    program(tmp_path, "squeue", "exec sleep 60", monkeypatch)
    began = time.monotonic()
    search = JobSearch(deadline_s=1.0)
    assert time.monotonic() - began < 0.9, "it begins, and waits for nobody"
    jobs, silent = search.results()
    assert jobs == [] and len(silent) == 1 and silent[0].startswith("Slurm has not told its jobs: ")
    assert time.monotonic() - began < 5


def test_an_engine_that_fails_is_told_in_its_words(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    program(tmp_path, "squeue", "echo 'slurm_load_jobs error: Unable to contact controller' >&2; exit 1", monkeypatch)
    _, (line,) = JobSearch().results()
    assert "Unable to contact controller" in line


def test_commands_of_slurm_without_a_cluster_are_no_engine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    program(tmp_path, "squeue", "echo 'fatal: Could not establish a configuration source' >&2; exit 1", monkeypatch)
    assert JobSearch().results() == ([], [])
    program(tmp_path, "sinfo", "echo 'fatal: Could not establish a configuration source' >&2; exit 1", monkeypatch)
    with pytest.raises(SpawnError, match="finds no Slurm cluster: there is no slurm"):
        start_hosts({"hosts": 1}, SlurmLauncher())


@pytest.mark.parametrize(
    ("code", "words"),
    [(0, "exit code 0"), (127, "exit code 127"), (137, "SIGKILL"), (255, "exit code 255"), (-9, "SIGKILL")],
)
def test_exit_codes_of_shells(code: int, words: str) -> None:
    assert words in describe_shell_exit(code)


@pytest.mark.slow
def test_jobs_of_kubernetes_are_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("kubernetes")
    from k8s_cluster import await_quiet, kubernetes_here

    with kubernetes_here("stand-in", tmp_path) as here:
        monkeypatch.setenv("KUBECONFIG", str(here.kubeconfig))
        hosts = start_hosts({"hosts": 2}, KubernetesLauncher(python=here.python, options=here.options()))
        with hosts.spawn_procs({"gpus": 1}, torch=False, owns_hosts=True) as procs:
            procs.execute(os.getpid).get(120)
            found, silent = JobSearch(deadline_s=60.0).results()
            assert silent == [] and sorted(job.number for job in found) == sorted(procs.saved.jobs)
            job = found[0]
            assert job.engine == "Kubernetes" and job.age_s is not None
            assert job.end == f"kubectl delete job -n ml {job.number}"
        await_quiet(here)
        shutdown()


@pytest.mark.nightly
@pytest.mark.timeout(300)  # a busy machine takes a minute to start a cluster
def test_placement_groups_of_ray_are_found(monkeypatch: pytest.MonkeyPatch) -> None:
    with ray_cluster() as nodes:
        hosts = start_hosts({"hosts": 2}, RayLauncher(nodes.address, options=["--num-cpus", "1"]))
        procs = hosts.spawn_procs({"gpus": 1}, torch=False, owns_hosts=True)
        procs.execute(os.getpid).get(120)
        monkeypatch.setenv("RAY_ADDRESS", nodes.address)
        (found,), silent = JobSearch(deadline_s=60.0).results()
        assert silent == [] and found.engine == "Ray" and found.hosts == 2 and found.age_s is not None
        assert found.number in procs.saved.jobs and found.end.startswith("kill its driver")
        procs.stop()
