"""Meshes end with their kernel, however it ends, and cells on them never block it."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterable
from typing import Any

import psutil
import pytest
from patience import wait_until
from rank_lines import by_rank, each_of

from tests.kernel.conftest import left_of

pytestmark = [pytest.mark.kernel, pytest.mark.usefixtures("no_lasting_template")]

StartKernel = Callable[..., Any]
Watch = Callable[[Iterable[psutil.Process]], None]

SPAWN = "from meshbook import this_host; procs = this_host().spawn_procs(per_host={'gpus': 2})"
SLEEP_ON_RANKS = (
    "import time\nfuture = procs.run('import time; time.sleep(600)')\nprint('started', flush=True)\nfuture.get()"
)
GONE_S = 30
"""Within this time after a ``kill -9`` of the kernel, agents and workers have ended by themselves."""


def with_mesh(kernel: Any) -> list[psutil.Process]:
    """Spawn two ranks from ``kernel``; returns the kernel with agent, template and workers."""
    spawned = kernel.run(SPAWN)
    assert spawned.ok, spawned.reply
    family: list[psutil.Process] = kernel.family()
    assert len(family) >= 1 + 1 + 1 + 2
    return family


def test_kernel_warms_its_host_up_in_the_background(start_kernel: StartKernel) -> None:
    kernel = start_kernel()
    wait_until(lambda: any(_has_torch(process) for process in kernel.family()[1:]))


def _has_torch(process: psutil.Process) -> bool:
    with contextlib.suppress(psutil.Error):  # it has ended meanwhile
        return any("libtorch" in file.path for file in process.memory_maps())
    return False


def test_kernel_starts_nothing_when_told_so(start_kernel: StartKernel, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MESHBOOK_PREWARM", "0")
    kernel = start_kernel()
    kernel.run("import time; time.sleep(1)")
    assert kernel.family() == [kernel.process]


@pytest.mark.some("idle")
@pytest.mark.parametrize("state", ["idle", "busy"])
def test_shutdown_stops_the_mesh_in_time(start_kernel: StartKernel, watch: Watch, state: str) -> None:
    kernel = start_kernel()
    family = with_mesh(kernel)
    watch(family)
    if state == "busy":
        kernel.start(SLEEP_ON_RANKS)
        kernel.wait_for_text("started")
    kernel.manager.shutdown_wait_time = 15.0  # a busy machine may need more than Jupyter's 5 s
    process = kernel.manager.provisioner.process
    asked_at = time.monotonic()
    kernel.manager.shutdown_kernel()
    assert process.returncode == 0, "the kernel did not end by itself"
    assert time.monotonic() - asked_at < 20  # of the 600 that the cell has
    assert not left_of(family, timeout_s=5)


def test_restart_in_a_busy_cell_leaves_the_mesh_to_the_new_kernel(
    start_kernel: StartKernel, watch: Watch, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MESHBOOK_LEASE_S", "60")  # a busy machine may take long to start a kernel
    kernel = start_kernel()
    family = with_mesh(kernel)
    watch(family)
    kernel.start(SLEEP_ON_RANKS)
    kernel.wait_for_text("started")
    former = kernel.process
    kernel.manager.restart_kernel()
    assert not left_of([former], timeout_s=5)
    kernel.client.wait_for_ready(timeout=60)
    assert 'attached to mesh "procs" again: gpus=2, cpu' in kernel.run("1").text()
    kernel.manager.shutdown_kernel()
    assert not left_of(family, timeout_s=5)


def test_kernel_killed_with_a_busy_mesh_leaves_no_process(start_kernel: StartKernel, watch: Watch) -> None:
    kernel = start_kernel()
    family = with_mesh(kernel)
    watch(family)
    kernel.start(SLEEP_ON_RANKS)
    kernel.wait_for_text("started")
    kernel.process.kill()
    assert not left_of(family, timeout_s=GONE_S)


def test_shutdown_answers_while_a_rank_ignores_interrupts(start_kernel: StartKernel, watch: Watch) -> None:
    kernel = start_kernel()
    family = with_mesh(kernel)
    watch(family)
    kernel.run("procs.run('import signal; signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGINT])').get()")
    kernel.start(SLEEP_ON_RANKS)
    kernel.wait_for_text("started")
    kernel.manager.shutdown_kernel()
    assert not left_of(family, timeout_s=5)


def test_magics_are_there_without_loading_anything_and_loading_changes_nothing(start_kernel: StartKernel) -> None:
    kernel = start_kernel()
    spawned = kernel.run("%mesh spawn gpus=2 --device cpu")
    assert spawned.ok, spawned.reply
    assert "gpus=2" in spawned.text()
    assert by_rank(kernel.run("%%mesh\nprint('hello')").text("stdout")) == each_of(2, "hello")
    assert kernel.run("%load_ext meshbook").ok
    assert by_rank(kernel.run("%%mesh\nprint('hello')").text("stdout")) == each_of(2, "hello")


@pytest.mark.some("python3")
@pytest.mark.parametrize("name", ["meshbook", "python3"])
def test_a_cell_that_heals_a_mesh_shows_what_was_done(start_kernel: StartKernel, name: str) -> None:
    kernel = start_kernel(name)
    with_mesh(kernel)
    cell = kernel.run("import meshbook; same = meshbook.heal_mesh(procs) is procs")
    assert cell.ok, cell.reply
    assert cell.text("stdout") == 'mesh "procs" is whole: nothing to heal\n' and cell.text("stderr") == ""
    assert kernel.value("same, procs.last_repair.ranks") == "(True, ())"
