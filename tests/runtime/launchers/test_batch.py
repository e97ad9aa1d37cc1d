"""Hosts by a batch scheduler, a real Slurm by sbatch: they work as others do, each failure is told, nothing is left."""

from __future__ import annotations

import contextlib
import importlib.util
import os
import signal
import subprocess
import textwrap
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest
from controllers import Zygote, alone
from slurm_cluster import await_quiet, slurm_cluster

import meshbook
from benchmarks.slurm_nodes import SlurmNodes
from meshbook import ProcMesh, start_hosts
from meshbook.errors import SpawnError, UsageError, WorkerLost
from meshbook.launchers.batch import BatchFiles, BatchLauncher
from meshbook.mesh.driven import own_sessions

# It is not imported to find out: that takes two seconds in each process that only collects the tests.
pytestmark = [
    pytest.mark.cluster,
    pytest.mark.skipif(importlib.util.find_spec("parsl") is None, reason="there is no parsl"),
]


@pytest.fixture(scope="module")
def nodes(clean_end: None) -> Iterator[SlurmNodes]:
    with pytest.MonkeyPatch.context() as patch, slurm_cluster(patch) as found:
        yield found
        meshbook.shutdown()


@contextlib.contextmanager
def spawned(count: int, *options: str, python: str | None = None) -> Iterator[ProcMesh]:
    """A rank on each of so many nodes, without torch: it is there soon."""
    launcher = BatchLauncher("slurm", python=python, options=options or ("--walltime", "0:30:00"))
    hosts = start_hosts({"hosts": count}, launcher)
    with hosts.spawn_procs({"gpus": 1}, torch=False, owns_hosts=True, env={"GREETING": "hello"}) as procs:
        yield procs


def loss(procs: ProcMesh, how: object, rank: int = 1) -> str:
    """What a call says of a rank that is lost by ``how`` while it runs."""
    future = procs.slice(hosts=rank).run("import time; time.sleep(120)")
    how()  # type: ignore[operator]
    with pytest.raises(WorkerLost) as told:
        future.get(60)
    return str(told.value)


def agent_of(procs: ProcMesh, host: int) -> psutil.Process:
    hello = procs._mesh.hosts[host].hello
    assert hello is not None
    return psutil.Process(hello.pid)


def job_of(procs: ProcMesh, host: int) -> str:
    return procs._mesh.hosts[host].launched.job


def left_files() -> list[Path]:
    """What jobs read, and what the scheduler has written; the logs of agents stay, as all logs do."""
    logs = [file for session in own_sessions() for file in session.logs.glob("*batch-*") if file.is_file()]
    return [file for file in logs if file.suffix != ".log"]


def test_a_lost_host_comes_back_by_another_job_and_nothing_is_left(nodes: SlurmNodes) -> None:
    with spawned(2) as procs:
        procs.run("kept = rank + 1").get(60)
        assert set(procs.hosts) == {"n1", "n2"} and len(nodes.queue()) == 2
        keys = [key for session in own_sessions() for key in (session.state.secret_key, session.state.public_key)]
        seen = [agent_of(procs, 0), *agent_of(procs, 0).children(recursive=True)]
        words = "".join(f"{process.cmdline()}{process.environ()}" for process in seen if process.is_running())
        assert "'meshbook', 'agent'" in words and not [key for key in keys if key in words]
        assert not [file for file in left_files() if file.suffix == ".ticket"], "each was read once"
        assert " ended (killed by SIGKILL" in loss(procs, agent_of(procs, 1).kill)
        before = job_of(procs, 0)
        procs.heal()
        code = "import os; (os.environ['GREETING'], globals().get('kept'))"
        assert procs.run(code).get(60).values() == [("hello", 1), ("hello", None)] and job_of(procs, 0) == before
        number = job_of(procs, 1)
        said = loss(procs, lambda: nodes.ask("scancel", number))
        assert f"JOB {number} ON n2 CANCELLED" in said, "whether the scheduler tells it first, or the agent"
        procs.heal()
        grown = procs.grow(hosts=1)
        assert grown.run("rank").get(60).values() == [0, 1, 2] and len(nodes.queue()) == 3
        assert grown.shrink(hosts=1).run("globals().get('kept')").get(60).values() == [1, None]
    await_quiet(nodes)
    assert not left_files()


@pytest.mark.slow
def test_a_job_that_is_requeued_is_a_lost_host_and_leaves_nothing(nodes: SlurmNodes) -> None:
    with spawned(2) as procs:
        procs.run("kept = rank + 1").get(60)
        number = job_of(procs, 1)
        said = loss(procs, lambda: nodes.ask("scontrol", "requeue", number))
        how = (f"its job {number} of Slurm was requeued, and is pending", "ended (killed by SIG", "no sign of life for")
        assert any(words in said for words in how), "whoever tells first: the scheduler, the agent, or its silence"
        procs.heal()
        assert job_of(procs, 1) != number
        assert procs.run("globals().get('kept')").get(60).values() == [1, None]
        assert not [line for line in nodes.queue() if line.startswith(f"{number} ")], "it was cancelled"
    await_quiet(nodes)
    assert not left_files()


def test_a_used_ticket_is_told_as_a_requeue(tmp_path: Path) -> None:
    script = BatchFiles(tmp_path, "batch-1").script("echo agent")
    ran = subprocess.run(["sh", "-c", script], capture_output=True, text=True, timeout=60)
    assert ran.returncode == 66 and "the scheduler has requeued the job" in ran.stdout and "agent" not in ran.stdout


def test_without_parsl(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(SpawnError, match=r"pip install 'meshbook\[batch\]'"):
        start_hosts({"hosts": 1}, BatchLauncher("pbs", options=["--walltime", "1:00:07"]))


@pytest.mark.parametrize(
    ("options", "more", "said"),
    [
        (("--walltime", "0:30:00", "--partition", "nosuch"), {}, "Slurm took no job: sbatch: error: invalid partition"),
        (("--walltme", "0:10:00"), {}, "Slurm has no option --walltme. Did you mean --walltime"),
        (("--walltime", "0:30:00"), {"python": "/no/python"}, "no Python at /no/python.*--python PATH"),
        (("--partition", "main"), {}, "say how long hosts of Slurm may run, as in -- --walltime 4:00:00"),
        (("--waltime", "1:00:00", "--walltime=1:0:0"), {}, "Slurm has no option --waltime. Did you mean --walltime"),
        (("--walltime=1:0:0", "--nodes-per-block", "2"), {}, "Slurm has no option --nodes-per-block"),
        (("--walltime=1:0:0", "--cores-per-node", "many"), {}, '--cores-per-node takes a number, not "many"'),
        (("--walltime",), {}, "--walltime needs a value"),
        (("4:00:00",), {}, "options of a batch scheduler are --NAME VALUE"),
    ],
)
def test_what_fails_is_told(nodes: SlurmNodes, options: tuple[str, ...], more: dict[str, str], said: str) -> None:
    with pytest.raises((SpawnError, UsageError), match=f"(?s){said}"), spawned(2, *options, **more):
        pass
    await_quiet(nodes)
    assert not left_files()


def test_a_machine_without_the_scheduler_is_told(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    for scheduler, program in {"pbs": "qsub", "sge": "qsub", "lsf": "bsub", "condor": "condor_submit"}.items():
        with pytest.raises(SpawnError, match=f"there is no {program} on this machine; .* is used from a login node"):
            start_hosts({"hosts": 1}, BatchLauncher(scheduler, options=["--walltime", "1:00:00"]))
    with pytest.raises(UsageError, match='unknown scheduler "pbz"; there is: pbs, torque, lsf, sge, condor, slurm'):
        BatchLauncher("pbz")


def test_a_folder_that_is_not_shared_is_told(tmp_path: Path) -> None:
    files = BatchFiles(tmp_path, "batch-1")
    done = subprocess.run(["bash", "-c", files.command], capture_output=True, text=True, timeout=60)
    assert done.returncode == 66
    (tmp_path / "batch-1.17.stderr").write_text(done.stderr)
    assert files.with_words("its job 7 has ended").startswith(
        f"its job 7 has ended: meshbook: no folder {tmp_path} on "
    )
    assert "must be shared with the nodes: set XDG_STATE_HOME" in files.with_words("it has ended")


def test_an_interrupt_in_the_queue_leaves_nothing(nodes: SlurmNodes, capfd: pytest.CaptureFixture[str]) -> None:
    printed = ""

    def press() -> None:
        nonlocal printed
        deadline = time.monotonic() + 60
        while "there: n" not in printed and time.monotonic() < deadline:
            time.sleep(0.05)
            printed += capfd.readouterr().out
        os.kill(os.getpid(), signal.SIGINT)

    thread = threading.Thread(target=press)
    thread.start()
    try:
        with pytest.raises(KeyboardInterrupt), spawned(5):
            pass
    finally:
        thread.join()
    assert "of Slurm is pending; there: n" in printed
    await_quiet(nodes)
    left = left_files()
    assert {file.suffix for file in left} <= {".stdout", ".stderr"}, "a job may open these as it is cancelled"
    for file in left:
        file.unlink()


_PROGRAM = """
    from meshbook import start_hosts
    from meshbook.launchers.batch import BatchLauncher
    hosts = start_hosts({"hosts": 2}, BatchLauncher("slurm", options=["--walltime", "0:30:00"]))
    procs = hosts.spawn_procs({"gpus": 1}, torch=False, owns_hosts=True, name="kept")
    procs.run("kept = rank + 1").get(60)
    say("ready")
    wait()
"""


@pytest.fixture(scope="module")
def zygote(nodes: SlurmNodes) -> Iterator[Zygote]:
    meshbook.shutdown()
    with alone() as started:
        yield started


@pytest.mark.slow
def test_the_next_controller_has_the_hosts_of_one_that_was_killed(nodes: SlurmNodes, zygote: Zygote) -> None:
    meshbook.shutdown()
    driver = zygote.start(textwrap.dedent(_PROGRAM))
    driver.expect("ready")
    driver.kill()
    queue = nodes.queue()
    attached = meshbook.attach("kept", timeout_s=60)
    procs = attached.mesh("kept")
    assert attached.lost_hosts == [] and len(queue) == 2
    assert procs.run("kept").get(60).values() == [1, 2]
    number = job_of(procs, 1)
    assert f"JOB {number} ON n2 CANCELLED" in loss(procs, lambda: nodes.ask("scancel", number))
    procs.heal()
    assert procs.run("globals().get('kept')").get(60).values() == [1, None]
    procs.stop()
    meshbook.shutdown()
    await_quiet(nodes)


@pytest.mark.slow
def test_collectives_run_across_jobs(nodes: SlurmNodes) -> None:
    hosts = start_hosts({"hosts": 2}, BatchLauncher("slurm", options=["--walltime", "0:30:00"]))
    with hosts.spawn_procs({"gpus": 2}, owns_hosts=True, device="cpu") as procs:
        code = "t = torch.ones(1) * rank; dist.all_reduce(t); (t.item(), dict(point))"
        assert procs.run(code).get(60).values()[3] == (6.0, {"hosts": 1, "gpus": 1})
    await_quiet(nodes)
