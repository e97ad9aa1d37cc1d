"""Hosts of ssh outlive the notebook's kernel, and the next one goes on with them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Any

import psutil
import pytest
from engine_clusters import SshHosts, await_quiet, ssh_hosts

pytestmark = pytest.mark.cluster


@pytest.fixture(scope="module")
def there() -> Iterator[SshHosts]:
    with ssh_hosts() as hosts:
        yield hosts


def test_the_next_kernel_has_the_hosts_and_the_same_spawn_goes_on(
    start_kernel: Callable[..., Any],
    watch: Callable[[Iterable[psutil.Process]], None],
    there: SshHosts,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("MESHBOOK_LEASE_S", "60")  # a busy machine may take long to start a kernel
    kernel = start_kernel()
    spawn = f"%mesh spawn gpus=1 --no-torch --on ssh:nodeA,nodeB -- -F {there.config}"
    assert 'mesh "main": hosts=2, gpus=1' in kernel.run(spawn, timeout_s=120).text()
    assert kernel.run("%%mesh\nkept = rank + 40").ok
    family = [*kernel.family(), *there.processes()]
    watch(family)
    kernel.process.kill()
    kernel.manager.restart_kernel(now=True)
    kernel.client.wait_for_ready(timeout=60)
    assert 'attached to mesh "main" again: hosts=2, gpus=1' in kernel.run("1").text()
    other = kernel.run(spawn.replace("nodeB", "nodeC"))
    assert not other.ok and "here from before" not in other.text(), "these are not the hosts that are asked for"
    same = kernel.run(spawn)
    assert "here from before the restart" in same.text(), same.reply
    after = kernel.run("%mesh eval kept").text()
    assert "[0] 40" in after and "[1] 41" in after
    kernel.manager.shutdown_kernel()
    await_quiet(there)
    assert not [process for process in psutil.wait_procs(family, timeout=20)[1] if process.is_running()]
