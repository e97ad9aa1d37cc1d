"""Monarch's jobs: hosts by name, started together, and ended together."""

from __future__ import annotations

import pickle
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

import psutil
import pytest
from engine_clusters import SshHosts, await_quiet, ssh_hosts
from patience import wait_until

from meshbook import this_host
from meshbook.errors import SpawnError, UsageError, WorkerLost
from meshbook.mesh.driven import own_meshes, own_sessions
from meshbook.monarch.job import (
    JobState,
    JobTrait,
    LocalJob,
    ProcessJob,
    SlurmJob,
    SSHJob,
    job_load,
    job_loads,
)

pytestmark = pytest.mark.monarch


@pytest.fixture(scope="module")
def there(clean_end: None) -> Iterator[SshHosts]:
    with ssh_hosts() as hosts:
        yield hosts


@pytest.fixture
def job() -> Iterator[ProcessJob]:
    made = ProcessJob({"trainers": 2, "judges": 1}, env={"GREETING": "hello"})
    yield made
    made.kill()


def agents() -> set[int]:
    return {host.pid for session in own_sessions() for host in session.state.hosts.values()}


def test_each_name_is_a_mesh_of_hosts(job: ProcessJob) -> None:
    assert not job.active
    state = job.state(cached_path=None)
    assert job.active and state.trainers.sizes == {"hosts": 2} and state.judges.sizes == {"hosts": 1}
    assert "trainers" in dir(state) and repr(state).startswith("JobState(trainers=HostMesh(hosts=2)")
    code = "import os; (rank, os.environ['GREETING'])"
    with state.trainers.spawn_procs(per_host={"gpus": 1}, torch=False) as procs:
        assert procs.sizes == {"hosts": 2, "gpus": 1}
        assert procs.run(code).get(60).values() == [(0, "hello"), (1, "hello")]
    with state.trainers.slice(hosts=0).spawn_procs(torch=False, env={"GREETING": "hi"}) as procs:
        assert procs.run(code).get(60).values() == [(0, "hi")]


def test_a_state_that_is_asked_for_again_is_the_same_and_a_lost_host_is_started_again(job: ProcessJob) -> None:
    hosts = job.state().judges
    with hosts.spawn_procs(torch=False) as procs:
        assert job.state().judges == hosts and procs.initialized.get(60)
        psutil.Process(procs._mesh.hosts[0].launched.pid).kill()
        with pytest.raises(WorkerLost):
            procs.run("import time; time.sleep(120)").get(60)
    with pytest.raises(SpawnError, match="is lost"):
        hosts.spawn_procs(torch=False)
    with job.state().judges.spawn_procs(torch=False) as procs:
        assert procs.run("rank").get(60).values() == [0]


def test_kill_ends_the_hosts_and_the_job_can_be_applied_again(job: ProcessJob) -> None:
    before = agents()
    job.apply()
    theirs = agents() - before
    assert len(theirs) == 3
    job.kill()
    job.kill()
    assert not job.active and agents() == before and not any(map(psutil.pid_exists, theirs))
    job.apply()
    assert job.active and len(agents() - before) == 3


def test_what_a_job_can_run(job: ProcessJob) -> None:
    same, other = ProcessJob({"trainers": 2, "judges": 1}, {"GREETING": "hello"}), ProcessJob({"trainers": 2})
    assert not job.can_run(same), "it has no hosts yet"
    job.apply()
    assert job.can_run(same) and not job.can_run(other) and not job.can_run(LocalJob(["trainers"]))
    assert LocalJob(["a"]).can_run(LocalJob(["a"])) and not LocalJob(["a"]).can_run(LocalJob(["b"]))


def test_a_local_job_is_this_host_by_other_names() -> None:
    job: JobTrait = LocalJob(["trainers", "judges"])
    state = job.state()
    with state.trainers.spawn_procs({"gpus": 1}, torch=False) as procs:
        assert procs.sizes == {"gpus": 1}
        job.kill()
        assert procs.run("rank").get(60).values() == [0], "others may use this host, so it stays"


BATCH = """
import sys
from meshbook.monarch.job import LocalJob
if __name__ == "__main__":
    hosts = LocalJob(["asked"]).state().trainers
    with hosts.spawn_procs({"gpus": 2}, torch=False) as procs:
        print(procs.run("rank").get(60).values(), flush=True)
    if "wait" in sys.argv[0]:
        sys.stdin.read()
"""


def test_a_script_runs_with_the_hosts_of_its_job(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(BATCH)
    job = LocalJob(["trainers"])
    job.apply(client_script=str(tmp_path / "train.py"))
    log = job.log_dir / "stdout.log"
    assert job.process.wait(120) == 0, (job.log_dir / "stderr.log").read_text()
    assert log.read_text() == "[0, 1]\n"
    assert job.active and list(job.state()._hosts) == ["trainers"]
    job.kill()
    (tmp_path / "fails.py").write_text("raise SystemExit('no data')")
    job.apply(client_script=str(tmp_path / "fails.py"))
    assert job.process.wait(120) == 1 and (job.log_dir / "stderr.log").read_text() == "no data\n"
    job.kill()
    (tmp_path / "waits.py").write_text("import time; print('begun', flush=True); time.sleep(600)")
    job.apply(client_script=str(tmp_path / "waits.py"))
    wait_until((job.log_dir / "stdout.log").read_text, 60)
    job.kill()
    assert job.process.poll() is not None and not job.active, "the script ends with its job"


def test_hosts_by_ssh(there: SshHosts) -> None:
    job = SSHJob(ssh_args=there.options)
    job.add_mesh("trainers", ["nodeA", "nodeB"])
    job.add_mesh("judges", ["nodeC"])
    state = job.state()
    with pytest.raises(UsageError, match="kill"):
        job.add_mesh("more", ["nodeA"])
    with state.trainers.spawn_procs({"gpus": 1}, torch=False) as procs:
        assert procs.hosts == ("nodeA", "nodeB") and procs.run("rank").get(60).values() == [0, 1]
    with state.judges.spawn_procs(torch=False) as procs:
        assert procs.hosts == ("nodeC",)
    job.kill()
    await_quiet(there)


def test_hosts_of_one_name_that_do_not_start_end_those_of_the_others(there: SshHosts) -> None:
    job = SSHJob(ssh_args=there.options)
    job.add_mesh("trainers", ["nodeA"])
    job.add_mesh("judges", ["nodeB", "closed"])
    with pytest.raises(SpawnError, match="host closed did not start"):
        job.apply()
    assert not job.active
    await_quiet(there)


def test_names_that_a_job_does_not_have(job: ProcessJob) -> None:
    with pytest.raises(
        AttributeError, match=r'no hosts "trainer"; it has trainers, judges\. Did you mean "trainers"\?'
    ):
        _ = job.state().trainer


def test_what_makes_no_job(there: SshHosts) -> None:
    for make, said in (
        (lambda: ProcessJob({}), "name the hosts"),
        (lambda: ProcessJob({"a b": 1}), "named by an identifier"),
        (lambda: ProcessJob({"a": 0}), "counted from 1"),
        (lambda: LocalJob([]), "name the hosts"),
        (lambda: SSHJob().apply(), "the job has no hosts"),
        (lambda: LocalJob().apply("nowhere.py"), "there is no script nowhere.py"),
        (lambda: ProcessJob({"a": 1}).apply("train.py"), "only a LocalJob has a batch mode"),
    ):
        with pytest.raises(UsageError, match=said):
            make()


class Allocation(JobTrait):
    """A job as programs write their own: this machine, by names."""

    def __init__(self, names: Sequence[str] = ("default",), runs: bool = True) -> None:
        super().__init__()
        self.names, self.runs = tuple(names), runs
        self.calls: list[str] = []

    def _create(self, client_script: str | None) -> None:
        self.calls.append("create")

    def _state(self) -> JobState:
        return JobState({name: this_host() for name in self.names})

    def can_run(self, spec: JobTrait) -> bool:
        return self.runs

    def _kill(self) -> None:
        self.calls.append("kill")


def test_a_job_of_ones_own_is_applied_once_and_has_a_name_while_it_runs() -> None:
    job = Allocation()
    assert (job.active, job.apply_id) == (False, None)
    job.apply()
    first = job.apply_id
    job.apply()
    assert job.calls == ["create"] and job.apply_id == first
    state = job.state()
    assert (
        repr(state).startswith("JobState(default=HostMesh(") and state.telemetry_url is None and state.admin_url is None
    )
    job.kill()
    job.kill()
    assert job.calls == ["create", "kill"] and job.apply_id is None
    job.apply()
    assert job.apply_id not in (None, first)


def test_a_job_in_a_file_is_taken_where_it_can_run_what_is_asked_for(tmp_path: Path) -> None:
    path = tmp_path / "jobs" / "state.pkl"
    first = Allocation(["trainers"])
    first.state(cached_path=path)
    assert path.stat().st_mode & 0o777 == 0o600
    second = Allocation(["judges"])
    assert dir(second.state(cached_path=path))[-1] == "trainers"
    assert second.calls == [] and second.apply_id == first.apply_id
    other = Allocation(["judges"], runs=False)
    other.apply()
    other.dump(path)
    third = Allocation(["judges"])
    third.state(cached_path=path)
    assert third.calls == ["create"] and third.apply_id != other.apply_id
    assert job_loads(third.dumps()).apply_id == third.apply_id == job_load(path).apply_id


def test_hosts_of_a_job_are_found_by_its_file_while_they_live(job: ProcessJob, tmp_path: Path) -> None:
    path = tmp_path / "job.pkl"
    hosts = job.state(cached_path=path).trainers
    loaded = job_load(path)
    assert (
        loaded.active
        and loaded.apply_id == job.apply_id
        and loaded.can_run(ProcessJob({"trainers": 2, "judges": 1}, {"GREETING": "hello"}))
    )
    again = loaded.state().trainers
    code = "import os; os.environ['GREETING']"
    with (
        again.slice(hosts=1).spawn_procs(torch=False) as procs,
        hosts.slice(hosts=1).spawn_procs(torch=False) as theirs,
    ):
        assert procs.run(code).get(60).values() == ["hello"] and procs._mesh.hosts == theirs._mesh.hosts
    before = agents()
    loaded.kill()
    assert len(before - agents()) == 3 and not loaded.active and not job_load(path).active
    fresh = ProcessJob({"judges": 1})
    assert fresh.state(cached_path=path).judges.sizes == {"hosts": 1} and job_load(path).active
    fresh.kill()


_LEFT = """
import sys, meshbook
from meshbook.monarch.job import ProcessJob
job = ProcessJob({"hosts": 2})
procs = job.state(cached_path=sys.argv[1]).hosts.spawn_procs({"gpus": 1}, name="left", torch=False)
procs.run("x = rank + 10").get(60)
meshbook.detach()
"""


def test_hosts_of_a_job_outlive_a_program_that_leaves_them(tmp_path: Path) -> None:
    path = tmp_path / "job.pkl"
    subprocess.run([sys.executable, "-c", _LEFT, str(path)], check=True, timeout=120)
    job = ProcessJob({"hosts": 2})
    hosts = job.state(cached_path=path).hosts
    mesh = next(mesh for mesh in own_meshes() if mesh.name == "left")
    assert mesh.run("x").get(60).values() == [10, 11]
    with hosts.slice(hosts=1).spawn_procs(torch=False) as procs:
        assert procs.run("1").get(60).values() == [1]
    job.kill()
    assert not job.active and not job_load(path).active


def test_files_without_a_job_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "job.pkl"
    with pytest.raises(FileNotFoundError):
        job_load(path)
    path.write_bytes(b"no pickle")
    with pytest.raises(UsageError, match="holds no job that can be read: UnpicklingError"):
        LocalJob().state(cached_path=path)
    path.write_bytes(pickle.dumps([1]))
    with pytest.raises(UsageError, match="that is no job, but a list"):
        job_load(path)


def test_what_jobs_do_not_have_says_what_there_is() -> None:
    job = LocalJob()
    for ask, said in (
        (lambda: job.enable_telemetry, "health widget"),
        (lambda: job.enable_admin, "health widget"),
        (lambda: job.telemetry_query_client, "OpenTelemetry"),
        (lambda: job.profile, "torch.profiler"),
        (lambda: job.remote_mount("src"), "sync_workspace"),
        (lambda: job.gather_mount("there", "here"), "read files on the ranks"),
        (lambda: job.process, "the job runs no script"),
        (lambda: job.log_dir, "the job runs no script"),
    ):
        with pytest.raises(UsageError, match=said):
            ask()


def test_what_a_job_of_slurm_asks_for() -> None:
    job = SlurmJob({"trainers": 2}, exclusive=True, account="ours", qos="high", slurm_args=["--no-requeue"])
    job.add_mesh("judges", 1)
    assert job._options == ("--account=ours", "--qos=high", "--exclusive", "--no-requeue")
    job.share_node(tasks_per_node=2, gpus_per_task=2, partition="shared")
    assert job._options == ("--partition=shared", "--gpus-per-node=4", "--account=ours", "--qos=high", "--no-requeue")
    assert job._meshes == {"trainers": 2, "judges": 1} and not job.can_run(SlurmJob({"trainers": 2}))


def test_a_job_of_slurm_takes_all_that_monarchs_does() -> None:
    with pytest.warns(UserWarning, match="monarch_port, log_dir, attach_to: taken, as in Monarch, but of no meaning"):
        job = SlurmJob(
            {"a": 1}, "python3", (), 22222, "mine", log_dir="logs", job_start_timeout=60, attach_to="tcp://*:1"
        )
    assert job._options == ("--job-name=mine", "--immediate=60")
    with pytest.raises(UsageError, match="ntasks_per_node is 1: a host starts its processes"):
        SlurmJob({"a": 1}, ntasks_per_node=8)
