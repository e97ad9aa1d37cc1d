"""The logs of clients and drivers are read as the reasons why hosts end; engines that are not used are not imported."""

from __future__ import annotations

import socket
import subprocess
import sys

import pytest

import meshbook
from meshbook import start_hosts
from meshbook.errors import SpawnError, UsageError
from meshbook.launchers.engines.slurm_jobs import StepLog
from meshbook.launchers.k8s import K8sLog
from meshbook.launchers.ray import RayLauncher, RayLog

# ---- Slurm, in the lines of 22.05 ------------------------------------------------------------------------------------

SLURM_STARTED = """salloc: Granted job allocation 12
meshbook: job 12
srun: cluster configuration lacks support for cpu binding
0: meshbook: on n1
1: meshbook: on n2
"""


@pytest.mark.parametrize(
    ("more", "said"),
    [
        ("", None),
        ("srun: error: n2: task 1: Killed\n", "its agent on n2 ended (killed)"),
        (
            "srun: error: n[1-2]: tasks 0-1: Exited with exit code 1\n",
            "its agent on n2 ended (exited with exit code 1)",
        ),
        ("1: ImportError: no\nsrun: error: n2: task 1: Exited with exit code 1\n", "exit code 1): ImportError: no"),
        ("srun: error: n2: task 1: Out Of Memory\n", "its agent on n2 ended (out of memory)"),
        ("srun: error: Node failure on n2\n", "node n2 has failed, as Slurm says"),
        ("srun: error: Node failure on n1\nsrun: error: n1: task 0: Killed\n", None),
        (
            "0: slurmstepd-n1: error: *** STEP 12.0 ON n1 CANCELLED AT 2026-01-01T00:00:00 DUE TO TIME LIMIT ***\n"
            "srun: error: n2: task 1: Terminated\nmeshbook: srun ended 143\n",
            "Slurm has cancelled job 12: time limit",
        ),
        (
            "0: slurmstepd-n1: error: *** STEP 12.0 ON n1 CANCELLED AT 2026-01-01T00:00:00 DUE TO PREEMPTION ***\n"
            "srun: error: n2: task 1: Terminated\nmeshbook: srun ended 143\n",
            "Slurm has cancelled job 12: preemption",
        ),
        ("meshbook: srun ended 137\n", "srun ended (killed by SIGKILL"),
    ],
)
def test_why_a_task_ended(more: str, said: str | None) -> None:
    log = StepLog.read(SLURM_STARTED + more)
    assert log.job == "12" and log.owned and log.is_granted and log.nodes == {0: "n1", 1: "n2"}
    why = log.why_ended(1, "n2", "salloc", None)
    assert why is None if said is None else why is not None and said in why


def test_a_job_in_the_queue_has_a_number_and_no_end() -> None:
    log = StepLog.read("salloc: Pending job allocation 8\nsalloc: job 8 queued and waiting for resources\n")
    assert log.job == "8" and not log.is_granted and log.why_ended(0, "", "salloc", None) is None


def test_a_refusal_is_told_in_the_words_of_slurm() -> None:
    log = StepLog.read("salloc: error: Job submit/allocate failed: Invalid partition name specified\n")
    assert log.why_ended(0, "", "salloc", 1) == "salloc: Job submit/allocate failed: Invalid partition name specified"


# ---- Ray -----------------------------------------------------------------------------------------------------------

RAY_STARTED = """
meshbook: {"job": "02000000", "socket": "/run/a"}
meshbook: {"waits": "Ray starts its agents"}
(raylet) something of its own
meshbook: {"node": "r1", "host": "ray-1"}
"""


@pytest.mark.parametrize(
    ("more", "status", "said"),
    [
        ("", None, None),
        ('meshbook: {"ended": "its agent ended", "host": "ray-1"}', None, None),
        ('meshbook: {"ended": "its agent ended", "host": "ray-2"}', None, "its agent ended"),
        ('meshbook: {"ended": "Version mismatch: 3 and 4"}', 1, "3 and 4. Install the cluster's versions of Ray"),
        ('meshbook: {"ended": "half a li', None, None),
        ("", -9, "the driver of Ray has ended (killed by SIGKILL, by kill -9 or the OOM killer)"),
        ("ValueError: no", 1, "(exit code 1): (raylet) something of its own; ValueError: no"),
    ],
)
def test_why_a_host_of_ray_ended(more: str, status: int | None, said: str | None) -> None:
    log = RayLog.read(RAY_STARTED + more)
    assert log.job == "02000000" and log.socket == "/run/a"
    assert log.waits_for("ray-1") == "" and log.waits_for("ray-2") == "Ray starts its agents"
    why = log.why_ended("ray-2", status)
    assert why is None if said is None else why is not None and said in why


@pytest.mark.cluster
def test_no_cluster_at_the_address() -> None:
    pytest.importorskip("ray")
    with socket.create_server(("127.0.0.1", 0)) as closed:
        address = f"127.0.0.1:{closed.getsockname()[1]}"
    with pytest.raises(SpawnError, match=f"there is no Ray cluster at {address}: Connection refused"):
        start_hosts({"hosts": 1}, RayLauncher(address)).spawn_procs(torch=False, owns_hosts=True)
    meshbook.shutdown()


@pytest.mark.cluster
def test_without_ray(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(SpawnError, match=r"pip install 'meshbook\[ray\]'"):
        start_hosts({"hosts": 1}, RayLauncher())
    meshbook.shutdown()


@pytest.mark.parametrize("options", [["--nodes=3"], ["--num-cpus", "many"], ["--resources", "[1]"]])
def test_options_of_ray_that_make_no_sense(options: list[str]) -> None:
    with pytest.raises(UsageError, match="Options of Ray are --num-cpus N"):
        RayLauncher(options=options)


# ---- Kubernetes ------------------------------------------------------------------------------------------------------


def test_pods_that_run_outlive_their_driver() -> None:
    log = K8sLog.read('meshbook: {"node": "pod p on node n1", "host": "k8s-1"}\nValueError: no\n')
    assert log.why_ended("k8s-1", 1) is None and log.waits_for("k8s-1") == ""
    assert log.why_ended("k8s-2", 1) == "the driver of Kubernetes has ended (exit code 1): ValueError: no"


@pytest.mark.cluster
def test_engines_that_are_not_used_are_not_imported() -> None:
    code = "import sys, meshbook.mesh.driven, meshbook.monarch.job; print(sorted(sys.modules))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    loaded = set(done.stdout.replace("'", "").strip("[]\n").split(", "))
    assert not loaded & {"ray", "kubernetes", "parsl"}
    assert not loaded & {f"meshbook.launchers.{engine}" for engine in ("batch", "k8s", "mpi", "ray", "slurm", "ssh")}
