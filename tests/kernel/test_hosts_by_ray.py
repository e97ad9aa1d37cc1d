"""Hosts of Ray outlive the notebook's kernel, and the next one goes on with them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Any

import psutil
import pytest
from ray_cluster import await_quiet, ray_cluster, tasks

from benchmarks.ray_nodes import RayNodes

pytestmark = pytest.mark.cluster


@pytest.fixture(scope="module")
def nodes() -> Iterator[RayNodes]:
    with ray_cluster() as found:
        yield found


@pytest.mark.nightly
@pytest.mark.timeout(300)  # a busy machine takes a minute to start a cluster
def test_the_next_kernel_has_the_hosts_and_the_same_spawn_goes_on(
    start_kernel: Callable[..., Any],
    watch: Callable[[Iterable[psutil.Process]], None],
    nodes: RayNodes,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("MESHBOOK_LEASE_S", "60")  # a busy machine may take long to start a kernel
    kernel = start_kernel()
    spawn = f"%mesh spawn hosts=2 gpus=1 --no-torch --on ray:{nodes.address} -- --num-cpus 1"
    assert 'mesh "main": hosts=2, gpus=1' in kernel.run(spawn, timeout_s=120).text()
    assert ", job " in kernel.run("%mesh list").text()
    assert kernel.run("%%mesh\nkept = rank + 40").ok
    watch([*kernel.family(), *tasks(nodes)])
    kernel.process.kill()
    kernel.manager.restart_kernel(now=True)
    kernel.client.wait_for_ready(timeout=60)
    assert 'attached to mesh "main" again: hosts=2, gpus=1' in kernel.run("1").text()
    other = kernel.run(spawn.replace("--num-cpus 1", "--num-cpus 2"))
    assert not other.ok and "here from before" not in other.text(), "that is not what was asked for"
    assert "here from before the restart" in kernel.run(spawn).text()
    after = kernel.run("%mesh eval kept").text()
    assert "[0] 40" in after and "[1] 41" in after and len(nodes.left()) == 1
    assert kernel.run("%mesh stop").ok and nodes.left() == []
    kernel.manager.shutdown_kernel()
    await_quiet(nodes)
