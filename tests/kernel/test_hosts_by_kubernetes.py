"""Hosts in pods outlive the notebook's kernel, and the next one goes on with them."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import psutil
import pytest

pytest.importorskip("kubernetes")
from k8s_cluster import await_quiet, kubernetes_here


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_the_next_kernel_has_the_hosts_heals_and_grows_them(
    start_kernel: Callable[..., Any],
    watch: Callable[[Iterable[psutil.Process]], None],
    monkeypatch: pytest.MonkeyPatch,
    tmp_path_factory: pytest.TempPathFactory,
) -> None:
    monkeypatch.setenv("MESHBOOK_LEASE_S", "60")  # a busy machine may take long to start a kernel
    with kubernetes_here("stand-in", tmp_path_factory.mktemp("k8s")) as here:
        kernel = start_kernel()
        options = " ".join(here.options())
        spawn = f"%mesh spawn hosts=2 gpus=1 --no-torch --on k8s --python {here.python} -- {options}"
        assert 'mesh "main": hosts=2, gpus=1' in kernel.run(spawn, timeout_s=120).text()
        assert kernel.run("%%mesh\nkept = rank + 40").ok
        assert "job meshbook-" in kernel.run("%mesh list").text()
        watch(kernel.family())
        kernel.process.kill()
        kernel.manager.restart_kernel(now=True)
        kernel.client.wait_for_ready(timeout=60)
        assert 'attached to mesh "main" again: hosts=2, gpus=1' in kernel.run("1").text()
        assert "here from before the restart" in kernel.run(spawn).text()
        after = kernel.run("%mesh eval kept").text()
        assert "[0] 40" in after and "[1] 41" in after
        here.delete_pod(sorted(name.partition("/")[2] for name in here.left() if name.count("-") == 3)[-1])
        said = kernel.run("%%mesh hosts=1\nimport time; time.sleep(60)", timeout_s=90)
        assert not said.ok and "was deleted" in f"{said.reply}{said.messages}"
        assert "rank 1 started again" in kernel.run("%mesh heal", timeout_s=120).text()
        assert "hosts=3, gpus=1; rank 2 is new" in kernel.run("%mesh grow hosts=1", timeout_s=120).text()
        assert kernel.run("%mesh stop").ok
        kernel.manager.shutdown_kernel()
        await_quiet(here)
