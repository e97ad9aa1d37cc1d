"""Start, interrupt, shutdown and restart of the kernel itself; meshes are in test_mesh_lifetime.py."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from ipykernel._version import version_info

from meshbook._version import __version__
from tests.kernel.conftest import left_of
from tests.support.patience import wait_until

pytestmark = pytest.mark.usefixtures("no_lasting_template")

StartKernel = Callable[..., Any]
SLEEP = "import time; print('started', flush=True); time.sleep(600)"


@pytest.fixture
def without_prewarm(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MESHBOOK_PREWARM", "0")


def test_kernel_introduces_itself(shared_kernel: Any) -> None:
    kernel = shared_kernel
    kernel.client.kernel_info()
    info = kernel.client.get_shell_msg(timeout=10)["content"]
    assert (info["implementation"], info["implementation_version"]) == ("meshbook", __version__)
    assert info["language_info"]["name"] == "python"
    assert "%mesh spawn" in info["banner"]


@pytest.mark.slow
@pytest.mark.skipif(version_info < (7, 3), reason="ipykernel speaks CURVE from 7.3 on")
@pytest.mark.usefixtures("without_prewarm")
def test_connections_can_be_encrypted(start_kernel: StartKernel) -> None:
    kernel = start_kernel(transport_encryption="required")
    assert kernel.value("6 * 7") == "42"


@pytest.mark.slow
def test_busy_cells_hand_over_quickly_to_the_threads_that_serve_the_mesh(shared_kernel: Any) -> None:
    assert float(shared_kernel.value("__import__('sys').getswitchinterval()")) <= 1e-3


@pytest.mark.slow
def test_interrupt_ends_the_cell_and_keeps_the_namespace(shared_kernel: Any) -> None:
    kernel = shared_kernel
    kernel.run("kept = 41")
    request = kernel.start(SLEEP)
    kernel.wait_for_text("started")
    asked_at = time.monotonic()
    kernel.manager.interrupt_kernel()
    reply = kernel.reply_to(request, timeout_s=10)
    assert reply["ename"] == "KeyboardInterrupt"
    assert time.monotonic() - asked_at < 2
    assert kernel.value("kept + 1") == "42"


def test_an_await_of_anything_ends_at_once(shared_kernel: Any) -> None:
    kernel = shared_kernel
    request = kernel.start("import asyncio; print('begun', flush=True); await asyncio.sleep(60)")
    kernel.wait_for_text("begun")
    time.sleep(0.3)
    pressed = time.monotonic()
    kernel.manager.interrupt_kernel()
    assert kernel.reply_to(request)["status"] == "error"
    assert time.monotonic() - pressed < 2
    assert kernel.run("%mesh spawn gpus=2 --device cpu --out procs").ok
    request = kernel.start("print('begun', flush=True); await procs.run('import time; time.sleep(60)')")
    kernel.wait_for_text("begun")
    time.sleep(1)
    pressed = time.monotonic()
    kernel.manager.interrupt_kernel()
    reply = kernel.reply_to(request)
    assert time.monotonic() - pressed < 2
    assert reply["ename"] == "CallInterrupted" and "ranks 0,1 stopped, all variables kept" in reply["evalue"]
    assert kernel.run("%mesh stop").ok


@pytest.mark.some()
@pytest.mark.quick("idle")
@pytest.mark.parametrize("state", ["idle", "busy", "awaiting"])
def test_shutdown_is_prompt_and_leaves_nothing(start_kernel: StartKernel, state: str) -> None:
    kernel = start_kernel()
    family = kernel.family()
    if state != "idle":
        wait = "await __import__('asyncio').sleep(600)" if state == "awaiting" else SLEEP
        kernel.start(f"print('started', flush=True)\n{wait}")
        kernel.wait_for_text("started")
    process = kernel.manager.provisioner.process
    kernel.manager.shutdown_wait_time = 30  # others may have the cores; by default it is ended by force after 2.5 s
    asked_at = time.monotonic()
    kernel.manager.shutdown_kernel()
    assert time.monotonic() - asked_at < 20
    assert process.returncode == 0, "the kernel did not end by itself"
    assert not left_of(family, timeout_s=5)


@pytest.mark.slow
def test_torch_is_imported_while_a_person_pauses(start_kernel: StartKernel) -> None:
    kernel = start_kernel()

    def has_torch() -> bool:
        return any("libtorch_cpu" in entry.path for entry in kernel.process.memory_maps())

    kernel.run("%mesh spawn gpus=1")
    assert kernel.value("'torch' in __import__('sys').modules") == "False"
    wait_until(has_torch, timeout_s=60)
    assert kernel.value("__import__('sys').modules['torch'].ones(2).sum().item()") == "2.0"


@pytest.mark.slow
def test_restart_while_a_cell_runs_is_prompt(start_kernel: StartKernel) -> None:
    kernel = start_kernel()
    old = kernel.family()
    kernel.start(SLEEP)
    kernel.wait_for_text("started")
    asked_at = time.monotonic()
    kernel.manager.restart_kernel()
    assert not left_of(old, timeout_s=5)
    kernel.client.wait_for_ready(timeout=60)
    assert time.monotonic() - asked_at < 10
    assert kernel.value("6 * 7") == "42"


@pytest.mark.slow
@pytest.mark.usefixtures("without_prewarm")
def test_kernel_works_and_says_so_when_the_extension_is_broken(start_kernel: StartKernel, tmp_path: Path) -> None:
    (tmp_path / "meshbook_extension.py").write_text("raise ImportError('widgets are from another age')")
    path = os.pathsep.join([str(tmp_path), os.environ.get("PYTHONPATH", "")])
    kernel = start_kernel(env={**os.environ, "PYTHONPATH": path})
    first, second = kernel.run("1 + 1"), kernel.run("1 + 1")
    assert first.ok
    assert second.ok
    assert "ImportError: widgets are from another age" in first.text("stderr")
    assert "%%mesh" in first.text("stderr")
    assert second.text() == ""
