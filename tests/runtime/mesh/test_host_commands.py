"""Commands on hosts, and the job of a folder."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from meshbook.errors import UsageError
from meshbook.job import LocalJob, ProcessJob, exec_command, hosts_from_config, load_current_job, set_current_job
from meshbook.mesh.host_mesh import HostMesh

pytestmark = pytest.mark.monarch


@pytest.fixture(scope="module")
def hosts(clean_end: None) -> Iterator[HostMesh]:
    job = ProcessJob({"hosts": 2})
    yield job.state().hosts
    job.kill()


def test_a_command_runs_on_every_host_and_is_shown(hosts: HostMesh, capfd: pytest.CaptureFixture[str]) -> None:
    command = [
        "sh",
        "-c",
        "echo $GREETING $MONARCH_RANK_hosts of $MONARCH_SIZE_hosts in $PWD; exit $MONARCH_RANK_hosts",
    ]
    assert exec_command(hosts, command, env={"GREETING": "hello"}, workdir="/").get(120) == 1
    said = capfd.readouterr().out.splitlines()
    assert sorted(line.split("] ")[-1] for line in said if "hello" in line) == [
        f"hello {rank} of 2 in /" for rank in (0, 1)
    ]


def test_a_command_writes_into_files_of_its_host(hosts: HostMesh, tmp_path: Path) -> None:
    folder = str(tmp_path / "out" / "$SUBDIR")
    code = "import os, sys; print(os.getcwd()); sys.stderr.write('bad'); os.kill(os.getpid(), 9)"
    (tmp_path / "run.py").write_text(code)
    assert exec_command(hosts, [str(tmp_path / "run.py")], output_dir=folder, point={"hosts": 1}).get(120) == 137
    assert not (tmp_path / "out" / "hosts_0").exists()
    (there,) = (tmp_path / "out").iterdir()
    assert (there / "stdout.txt").read_text().strip() in ("", os.getcwd())
    assert (there / "stderr.txt").read_text() in ("", "bad")
    assert exec_command(hosts, ["-m", "calendar", "2026"], output_dir=folder, rank=0, per_host={"p": 2}).get(120) == 0
    assert "January" in (tmp_path / "out" / "p_1" / "stdout.txt").read_text()


def test_a_command_that_is_cancelled_ends(hosts: HostMesh, tmp_path: Path) -> None:
    pid = tmp_path / "pid"
    running = exec_command(hosts, ["sh", "-c", f"echo $$ > {pid}; exec sleep 600"], rank=0)
    while not (pid.exists() and pid.read_text().strip()):
        time.sleep(0.01)
        assert not running.done(), running.get(0)
    running.cancel()
    process = psutil.Process(int(pid.read_text()))
    psutil.wait_procs([process], timeout=60)
    assert not process.is_running()


def test_commands_that_cannot_be_are_refused(hosts: HostMesh) -> None:
    with pytest.raises(UsageError, match="a command is a list"):
        exec_command(hosts, "ls")
    with pytest.raises(UsageError, match="a command is a list"):
        exec_command(hosts, [])
    with pytest.raises(UsageError, match="give rank= or point=, not both"):
        exec_command(hosts, ["ls"], rank=0, point={"hosts": 0})
    with pytest.raises(Exception, match="no-such-program"):
        exec_command(hosts, ["no-such-program"]).get(120)


def test_the_job_of_a_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    (tmp_path / "jobs_here.py").write_text(
        "from meshbook.job import LocalJob\nsmall = LocalJob(['trainers'])\nno = 1\n"
    )
    with pytest.raises(FileNotFoundError, match=r"no job was set in .*: set_current_job\(\"module.job\"\) does"):
        load_current_job()
    with pytest.raises(UsageError, match="name a module and a job"):
        set_current_job("jobs")
    set_current_job("jobs_here.small")
    assert isinstance(load_current_job(), LocalJob)
    assert hosts_from_config("trainers").sizes == {}
    with pytest.raises(AttributeError, match='no hosts "judges"'):
        hosts_from_config("judges")
    set_current_job("jobs_here.no")
    with pytest.raises(TypeError, match=r"jobs_here\.no is no job, but a int"):
        load_current_job()
    sys.modules.pop("jobs_here")


def test_hosts_without_a_job_are_two_of_this_machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    hosts = hosts_from_config("trainers")
    assert hosts.sizes == {"hosts": 2} and hosts_from_config("trainers") == hosts
    hosts.shutdown().get(20)
