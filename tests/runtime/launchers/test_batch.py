"""Hosts by a batch scheduler, a real Slurm by sbatch: they work as others do, each failure is told, nothing is left."""

from __future__ import annotations

import importlib.util
import subprocess
from pathlib import Path

import pytest
from controllers import Zygote
from engine_clusters import await_quiet
from engine_hosts import (
    Shown,
    agent_of,
    check_collectives,
    check_next_controller,
    check_no_secret_is_seen,
    interrupted_once,
    job_of,
    kill_controller,
    loss,
    program,
    spawned,
)

from benchmarks.slurm_nodes import SlurmNodes
from meshbook import start_hosts
from meshbook.errors import SpawnError, UsageError
from meshbook.launchers.batch import BatchFiles, BatchLauncher
from meshbook.launchers.engines.batch_queue import queue_of
from meshbook.mesh.driven import own_sessions

# It is not imported to find out: that takes two seconds in each process that only collects the tests.
pytestmark = [
    pytest.mark.cluster,
    pytest.mark.skipif(importlib.util.find_spec("parsl") is None, reason="there is no parsl"),
]


def launcher(*options: str, python: str | None = None) -> BatchLauncher:
    return BatchLauncher("slurm", python=python, options=options or ("--walltime", "0:30:00"))


def left_files() -> list[Path]:
    """What jobs read, and what the scheduler has written; the logs of agents stay, as all logs do."""
    logs = [file for session in own_sessions() for file in session.logs.glob("*batch-*") if file.is_file()]
    return [file for file in logs if file.suffix != ".log"]


def test_a_lost_host_comes_back_by_another_job_and_nothing_is_left(nodes: SlurmNodes) -> None:
    with spawned(2, launcher()) as procs:
        procs.run("kept = rank + 1").get(60)
        assert set(procs.hosts) == {"n1", "n2"} and len(nodes.queue()) == 2
        check_no_secret_is_seen([agent_of(procs, 0), *agent_of(procs, 0).children(recursive=True)])
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
    with spawned(2, launcher()) as procs:
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


def test_a_folder_of_logs_that_parsl_would_take_apart_is_refused(nodes: SlurmNodes, tmp_path: Path) -> None:
    (folder := tmp_path / "two words").mkdir()
    queue = queue_of("slurm", ("--walltime", "0:30:00"))
    with pytest.raises(SpawnError, match=r"unquoted into the command sbatch, .*two words apart.*XDG_STATE_HOME"):
        queue.submit("true", folder, "batch-1")
    assert not nodes.queue()


def test_without_parsl(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(SpawnError, match=r"pip install 'meshbook\[batch\]'"):
        start_hosts({"hosts": 1}, BatchLauncher("pbs", options=["--walltime", "1:00:07"]))


@pytest.mark.parametrize(
    ("options", "more", "said"),
    [
        (("--walltime", "0:30:00", "--partition", "nosuch"), {}, "Slurm took no job: sbatch: error: invalid partition"),
        (("--walltme", "0:10:00"), {}, 'Slurm has no option --walltme. Did you mean "--walltime"'),
        (("--walltime", "0:30:00"), {"python": "/no/python"}, "no Python at /no/python.*--python PATH"),
        (("--partition", "main"), {}, "say how long hosts of Slurm may run, as in -- --walltime 4:00:00"),
        (("--waltime", "1:00:00", "--walltime=1:0:0"), {}, 'Slurm has no option --waltime. Did you mean "--walltime"'),
        (("--walltime=1:0:0", "--nodes-per-block", "2"), {}, "Slurm has no option --nodes-per-block"),
        (("--walltime=1:0:0", "--cores-per-node", "many"), {}, '--cores-per-node takes a number, not "many"'),
        (("--walltime",), {}, "--walltime needs a value"),
        (("4:00:00",), {}, "options of a batch scheduler are --NAME VALUE"),
    ],
)
def test_what_fails_is_told(nodes: SlurmNodes, options: tuple[str, ...], more: dict[str, str], said: str) -> None:
    with pytest.raises((SpawnError, UsageError), match=f"(?s){said}"), spawned(2, launcher(*options, **more)):
        pass
    await_quiet(nodes)
    assert not left_files()


def test_a_machine_without_the_scheduler_is_told(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    for scheduler, submits in {"pbs": "qsub", "sge": "qsub", "lsf": "bsub", "condor": "condor_submit"}.items():
        with pytest.raises(SpawnError, match=f"there is no {submits} on this machine; .* is used from a login node"):
            start_hosts({"hosts": 1}, BatchLauncher(scheduler, options=["--walltime", "1:00:00"]))
    with pytest.raises(UsageError, match=r'batch needs a scheduler: batch:pbs, .*There is no "pbz"'):
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


def test_an_interrupt_in_the_queue_leaves_nothing(nodes: SlurmNodes, shown: Shown) -> None:
    with interrupted_once(lambda: "there: n" in shown()), spawned(5, launcher()):
        pass
    assert "of Slurm is pending; there: n" in shown()
    await_quiet(nodes)
    left = left_files()
    assert {file.suffix for file in left} <= {".stdout", ".stderr"}, "a job may open these as it is cancelled"
    for file in left:
        file.unlink()


@pytest.mark.slow
def test_the_next_controller_has_the_hosts_of_one_that_was_killed(nodes: SlurmNodes, zygote: Zygote) -> None:
    kill_controller(zygote, program("batch.BatchLauncher('slurm', options=['--walltime', '0:30:00'])"))
    assert len(nodes.queue()) == 2
    check_next_controller(lambda procs: nodes.ask("scancel", job_of(procs, 1)), "ON n2 CANCELLED")
    await_quiet(nodes)


@pytest.mark.slow
def test_collectives_run_across_jobs(nodes: SlurmNodes) -> None:
    check_collectives(launcher())
    await_quiet(nodes)
