"""Hosts of mpirun outlive the notebook's kernel, and the next one goes on with them."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import psutil
import pytest
from mpi_hosts import mpi_hosts

pytestmark = pytest.mark.cluster


@pytest.mark.slow
def test_the_next_kernel_has_the_hosts_and_the_same_spawn_goes_on(
    start_kernel: Callable[..., Any],
    watch: Callable[[Iterable[psutil.Process]], None],
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
) -> None:
    monkeypatch.setenv("MESHBOOK_LEASE_S", "60")  # a busy machine may take long to start a kernel
    with mpi_hosts("openmpi", tmp_path) as there:
        kernel = start_kernel()
        options = " ".join(there.options("nodeA", "nodeB"))
        spawn = f"%mesh spawn hosts=2 gpus=1 --no-torch --on mpi:{there.program} -- {options}"
        assert 'mesh "main": hosts=2, gpus=1' in kernel.run(spawn, timeout_s=120).text()
        assert kernel.run("%%mesh\nkept = rank + 40").ok
        watch(kernel.family())
        kernel.process.kill()
        kernel.manager.restart_kernel(now=True)
        kernel.client.wait_for_ready(timeout=60)
        assert 'attached to mesh "main" again: hosts=2, gpus=1' in kernel.run("1").text()
        assert "here from before the restart" in kernel.run(spawn).text()
        after = kernel.run("%mesh eval kept").text()
        assert "[0] 40" in after and "[1] 41" in after
        assert kernel.run("%mesh stop").ok
        kernel.manager.shutdown_kernel()
