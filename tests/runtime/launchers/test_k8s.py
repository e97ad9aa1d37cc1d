"""Hosts in pods of Kubernetes: they work as others do, each failure is told in its words, and nothing is left."""

from __future__ import annotations

import os
import signal
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from controllers import Zygote
from engine_hosts import (
    Shown,
    check_next_controller,
    check_no_secret_is_seen,
    interrupted_once,
    job_of,
    kill_controller,
    known_hosts,
    loss,
    program,
    refusal,
    spawned,
)
from patience import wait_until

import meshbook
from meshbook import start_hosts
from meshbook.errors import SpawnError, UsageError
from meshbook.launchers.engines.k8s_manifests import make_job, read_options
from meshbook.launchers.k8s import KubernetesLauncher
from meshbook.monarch.job import ImageSpec, KubernetesJob

pytest.importorskip("kubernetes")
from engine_clusters import await_quiet, drivers, kubernetes_here
from kubernetes import client

from benchmarks.k8s.cluster import KubernetesHere
from benchmarks.k8s.nodes import CONTAINER, IMAGE

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]


@pytest.fixture(scope="module")
def here(tmp_path_factory: pytest.TempPathFactory, clean_end: None) -> Iterator[KubernetesHere]:
    with kubernetes_here(tmp_path_factory.mktemp("k8s")) as found:
        yield found
        meshbook.shutdown()


@pytest.fixture
def short_tmp() -> Iterator[Path]:
    """A folder with a path that is short enough for a socket's."""
    with tempfile.TemporaryDirectory() as folder:
        yield Path(folder)


def launcher(here: KubernetesHere, *more: str, python: str = "") -> KubernetesLauncher:
    return KubernetesLauncher(python=python or here.python, options=here.options(*more))


# ---- what works -----------------------------------------------------------------------------------------------------


def test_collectives_run_across_pods(here: KubernetesHere) -> None:
    hosts = start_hosts({"hosts": 2}, launcher(here, "--gpus", "1"))
    with hosts.spawn_procs({"gpus": 1}, device="cpu", owns_hosts=True) as procs:
        code = "import platform; t = torch.ones(1) * rank; dist.all_reduce(t); (t.item(), dict(point), platform.node())"
        values = procs.run(code).get(60).values()
        assert [value[:2] for value in values] == [(1.0, {"hosts": 0, "gpus": 0}), (1.0, {"hosts": 1, "gpus": 0})]
        assert all(value[2].startswith(job_of(procs, rank)) for rank, value in enumerate(values))
        in_pod = here.nodes.of(job_of(procs, 0)).first().children(recursive=True)
        assert "k8s_driver" in check_no_secret_is_seen([drivers("k8s")[0], *in_pod])
    await_quiet(here)


def test_a_pod_without_a_way_to_the_notebook_says_where_it_has_dialled(
    here: KubernetesHere, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("benchmarks.k8s.nodes.CONTAINER", (CONTAINER[0], "--net", *CONTAINER[1:]))
    words = r"reached nobody at tcp://\S+ within \d+ s: the notebook's machine must be reachable there"
    began = time.monotonic()
    with pytest.raises(SpawnError, match=words), spawned(1, launcher(here)):
        pass
    assert time.monotonic() - began < 50, "a host that says nothing has a minute"
    await_quiet(here)


def test_hosts_of_a_job_by_name_have_images_and_amounts_of_their_own(here: KubernetesHere) -> None:
    job = KubernetesJob("ml", kubeconfig=str(here.kubeconfig), python_exe=here.python)
    with pytest.raises(UsageError, match="the job has no hosts"):
        job.apply()
    job.add_mesh("trainers", 1, image_spec=ImageSpec(IMAGE, {"nvidia.com/gpu": 2}))
    job.add_mesh("judges", 1, image_spec=IMAGE)
    state = job.state()
    with state.trainers.spawn_procs(torch=False) as trainers, state.judges.spawn_procs(torch=False) as judges:
        containers = [here.nodes.of(job_of(procs, 0)).pod.spec.containers[0] for procs in (trainers, judges)]
        assert [each.resources and each.resources.limits for each in containers] == [{"nvidia.com/gpu": "2"}, None]
    job.kill()
    await_quiet(here)


def test_what_ends_a_pod_is_told_and_another_takes_its_place(here: KubernetesHere) -> None:
    with spawned(2, launcher(here, "--memory", "1Gi")) as procs:
        procs.run("kept = rank + 1").get(60)
        first = job_of(procs, 1)
        said = loss(procs, here.nodes.of(first).agent().kill)
        assert "its agent in pod meshbook-" in said and "ended (killed by SIGKILL" in said and " on node n" in said
        assert "started again, rank 1 started again" in str(procs.heal())
        code = "import os; (os.environ['GREETING'], globals().get('kept'))"
        assert procs.run(code).get(60).values() == [("hello", 1), ("hello", None)]
        second = job_of(procs, 1)
        assert second != first and len(drivers("k8s")) == 1
        said = loss(procs, lambda: here.delete_pod(second))
        assert f"pod {second}-" in said and "was deleted" in said
        procs.heal()
        third = job_of(procs, 1)
        said = loss(procs, lambda: here.nodes.run_out_of_memory(third))
        assert "was out of memory (OOMKilled, exit code 137" in said and "its limit is 1Gi" in said
        procs.heal()
        procs.grow(hosts=1)
        assert procs.base().run("rank").get(60).values() == [0, 1, 2]
        procs.base().shrink(hosts=1)
        assert procs.base().run("globals().get('kept')").get(60).values() == [1, None]
        assert len([name for name in here.left() if name.startswith("ml/")]) <= 9
    await_quiet(here)


def test_pods_outlive_their_driver(here: KubernetesHere) -> None:
    with spawned(2, launcher(here)) as procs:
        drivers("k8s")[0].kill()
        assert procs.run("rank").get(60).values() == [0, 1]
        assert procs.slice(hosts=1).run("import os; os.getppid()").get(60)
        loss(procs, here.nodes.of(job_of(procs, 1)).first().kill)
        procs.heal()
        assert procs.run("rank").get(60).values() == [0, 1]
    await_quiet(here)


def test_a_driver_that_is_told_to_end_while_it_starts_removes_its_jobs(here: KubernetesHere, short_tmp: Path) -> None:
    wants = read_options(here.options("--gpus", "3"))  # which waits for ever
    job = make_job("left", "left", wants, here.python, {})
    client.BatchV1Api(here.api).create_namespaced_job("ml", job)
    driver = launcher(here).start_driver(short_tmp / "log", f"{short_tmp}/s", [{"id": "h", "name": "left"}], "left")
    os.kill(driver.pid, signal.SIGTERM)
    driver.end(60)
    await_quiet(here)


# ---- controllers come and go ----------------------------------------------------------------------------------------


def program_of(here: KubernetesHere, *more: str, **environment: str) -> str:
    made = f"k8s.KubernetesLauncher(python={here.python!r}, options={list(here.options(*more))!r})"
    return program(made, **environment)


def test_the_next_controller_has_the_hosts_of_one_that_was_killed(here: KubernetesHere, zygote: Zygote) -> None:
    kill_controller(zygote, program_of(here))
    check_next_controller(lambda procs: here.nodes.of(job_of(procs, 1)).agent().kill(), "its agent in pod")
    await_quiet(here)


def test_without_a_controller_all_ends_with_the_lease(here: KubernetesHere, zygote: Zygote) -> None:
    kill_controller(zygote, program_of(here, MESHBOOK_LEASE_S="1"))
    await_quiet(here)


# ---- what can go wrong ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("more", "said"),
    [
        pytest.param(
            ["--image", "nope:1"],
            'ErrImagePull: failed to pull and unpack image "nope:1": not found. Name another image',
            marks=pytest.mark.nightly,
        ),
        (["--namespace", "nowhere"], 'namespaces "nowhere" not found. Name another: -- --namespace NAME'),
        pytest.param(["--context", "there"], 'has no context "there"; it has here', marks=pytest.mark.nightly),
        (["--kubeconfig", "/no/such/file"], "no kubeconfig can be used: there is none at /no/such/file"),
    ],
)
def test_what_kubernetes_cannot_give(here: KubernetesHere, more: list[str], said: str) -> None:
    assert said in refusal(launcher(here, *more), 2, here)


def test_no_such_interpreter(here: KubernetesHere) -> None:
    said = refusal(launcher(here, python="/no/such/python"), 1, here)
    assert "its agent in pod" in said and "ended (exit code 127)" in said
    assert "no Python at /no/such/python. Name the interpreter that has meshbook in the image" in said


@pytest.mark.parametrize(
    ("user", "said"),
    [
        (
            "reader",
            'is forbidden: User "reader" cannot create resource "jobs" in API group "batch" in the namespace "ml"',
        ),
        pytest.param("stranger", "Unauthorized. Log in again", marks=pytest.mark.nightly),
    ],
)
def test_users_who_may_not(here: KubernetesHere, user: str, said: str) -> None:
    assert said in refusal(launcher(here, "--kubeconfig", here.as_user(user)))


def test_no_api_server(here: KubernetesHere) -> None:
    nobody = here.as_user("admin", "http://127.0.0.1:1")
    said = refusal(launcher(here, "--kubeconfig", nobody))
    assert "the API server at http://127.0.0.1:1 does not answer: Connection refused" in said


@pytest.mark.parametrize(
    ("more", "words"),
    [
        (["--gpus", "3"], "waits for a node: 0/3 nodes are available: 3 Insufficient nvidia.com/gpu"),
        pytest.param(
            ["--namespace", "full"],
            "is forbidden: exceeded quota: none, requested: pods=1",
            marks=pytest.mark.nightly,
        ),
    ],
)
def test_an_interrupt_while_pods_wait_leaves_nothing(
    here: KubernetesHere, shown: Shown, more: list[str], words: str
) -> None:
    with interrupted_once(lambda: words in shown()), spawned(2, launcher(here, *more)):
        pass
    assert words in shown()
    await_quiet(here)
    assert not known_hosts("k8s")


def test_a_controller_that_is_killed_leaves_nothing_waiting(here: KubernetesHere, zygote: Zygote) -> None:
    controller = zygote.start(program_of(here, "--gpus", "3"))
    wait_until(lambda: len(here.left()) == 6, 60)
    controller.kill()
    await_quiet(here)
