"""Monarch's jobs: hosts by name, started together, and ended together."""

from __future__ import annotations

from collections.abc import Iterator

import psutil
import pytest
from ssh_hosts import SshHosts, ssh_hosts

from meshbook.errors import SpawnError, UsageError, WorkerLost
from meshbook.job import JobTrait, LocalJob, ProcessJob, SSHJob
from meshbook.mesh.driven import own_sessions


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
        assert job.state().judges is hosts
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
    there.await_quiet()


def test_hosts_of_one_name_that_do_not_start_end_those_of_the_others(there: SshHosts) -> None:
    job = SSHJob(ssh_args=there.options)
    job.add_mesh("trainers", ["nodeA"])
    job.add_mesh("judges", ["nodeB", "closed"])
    with pytest.raises(SpawnError, match="host closed did not start"):
        job.apply()
    assert not job.active
    there.await_quiet()


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
        (lambda: LocalJob().apply("train.py"), "no batch mode"),
        (lambda: LocalJob().state(cached_path="x.pkl"), "not kept in a file"),
    ):
        with pytest.raises(UsageError, match=said):
            make()
