"""Hosts that people have started outlive the notebook's kernel, and the next one goes on with them."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import psutil
import pytest
from joined import LINE, Machine, command

pytestmark = pytest.mark.cluster


def show_command(kernel: Any, line: str) -> str:
    """Run a line until it shows a command; what it has shown."""
    kernel.start(line)
    seen = ""
    while not LINE.search(seen):
        message = kernel.client.get_iopub_msg(timeout=60)
        content = message["content"]
        seen += content.get("data", {}).get("text/plain", content.get("text", ""))
    return seen


@pytest.mark.slow
def test_the_next_kernel_has_the_hosts_and_heals_them_by_another_command(
    start_kernel: Callable[..., Any],
    watch: Callable[[Iterable[psutil.Process]], None],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("MESHBOOK_LEASE_S", "60")  # a busy machine may take long to start a kernel
    kernel = start_kernel()
    spawn = "%mesh spawn hosts=2 gpus=1 --no-torch --on manual --within 10m"
    line = command(show_command(kernel, spawn))
    machines = [Machine(line), Machine(line)]
    kernel.wait_for_text('mesh "main": hosts=2, gpus=1')
    assert kernel.run("%%mesh\nkept = rank + 40").ok
    watch([*kernel.family(), *(process for machine in machines for process in machine.processes())])
    kernel.process.kill()
    kernel.manager.restart_kernel(now=True)
    kernel.client.wait_for_ready(timeout=60)
    assert 'attached to mesh "main" again: hosts=2, gpus=1' in kernel.run("1").text()
    assert "here from before the restart" in kernel.run(spawn).text()
    after = kernel.run("%mesh eval kept").text()
    assert "[0] 40" in after and "[1] 41" in after
    machines[1].press_interrupt()
    assert "was ended there, by SIGINT" in machines[1].end()
    assert not kernel.run("%%mesh\nrank").ok, "one of the two is lost"
    machines.append(Machine(command(show_command(kernel, "%mesh heal"))))
    kernel.wait_for_text("started again")
    after = kernel.run("%mesh eval globals().get('kept')").text()
    assert ("40" in after) + ("41" in after) == 1
    assert kernel.run("%mesh stop").ok
    assert all(machine.end().endswith("the mesh has ended\n") for machine in (machines[0], machines[2]))
    kernel.manager.shutdown_kernel()
