"""A short look at everything, for Pythons and dependencies other than those of development: `make test-pythons`."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import cloudpickle
import ipykernel
import IPython
import pytest
from actor_classes import Counter
from jupyter_core.utils import ensure_event_loop
from rank_lines import by_rank, each_of
from stock_kernel import TIMEOUT_S, StockKernel

from meshbook import ProcMesh, errors, shutdown, this_host
from meshbook.actor import Actor, ActorError, endpoint

PATIENCE_S = 180  # what is started for the first time is compiled first


class Sleeper(Actor):
    """Waits, in both manners."""

    @endpoint
    def sleep(self) -> None:
        time.sleep(60)

    @endpoint
    async def sleep_async(self) -> None:
        import asyncio

        await asyncio.sleep(60)

    @endpoint
    async def answer(self) -> int:
        return 42


@pytest.fixture(scope="module")
def mesh() -> Iterator[ProcMesh]:
    """Two ranks with a process group, which get the classes of this file by value."""
    here = sys.modules[__name__]
    cloudpickle.register_pickle_by_value(here)
    with this_host().spawn_procs({"gpus": 2}) as mesh:
        yield mesh
    shutdown()
    cloudpickle.unregister_pickle_by_value(here)


@pytest.fixture(scope="session")
def clients_loop() -> None:
    """jupyter_client's own, which lasts as long as this process."""
    ensure_event_loop()


def until_busy(mesh: ProcMesh) -> None:
    """Wait until the ranks have begun a cell."""
    deadline = time.monotonic() + 30
    while any(status.state != "busy" or "cell" not in status.where for status in mesh.status()):
        assert time.monotonic() < deadline
        time.sleep(0.02)


def test_cells_have_magics_commands_await_and_collectives(mesh: ProcMesh, tmp_path: Path) -> None:
    mesh.execute(os.chdir, str(tmp_path)).get(60)
    lines = ["%time import asyncio", "!echo from rank {rank} > said.{rank}", "await asyncio.sleep(0)"]
    lines += ["x = torch.ones(2) * rank", "dist.all_reduce(x)", "(open(f'said.{rank}').read(), x.tolist())"]
    values = mesh.run("\n".join(lines)).get(60).values()
    assert values == [(f"from rank {rank}\n", [1.0, 1.0]) for rank in range(2)]


@pytest.mark.skipif(
    IPython.version_info < (8,) and sys.version_info >= (3, 12),
    reason="IPython 7 takes `said = !command` for a syntax error on Python 3.12, in every shell",
)
def test_a_commands_output_is_a_value(mesh: ProcMesh) -> None:
    assert mesh.run("said = !echo from rank {rank}\nlist(said)").get(60).values() == [["from rank 0"], ["from rank 1"]]


def test_values_travel_and_functions_run(mesh: ProcMesh) -> None:
    import torch

    big = torch.arange(500_000, dtype=torch.float32)
    mesh.push({"big": big}).get(60)
    assert all(torch.equal(value, big) for value in mesh.pull("big").get(60).values())
    assert mesh.execute(lambda power: 2**power, 10).get(60).values() == [1024, 1024]


def test_ranks_that_wait_for_one_that_raised_are_freed(mesh: ProcMesh) -> None:
    with pytest.raises(errors.CallFailed, match="bad shard") as told:
        mesh.run("if rank == 1:\n    raise ValueError('bad shard')\ndist.all_reduce(torch.ones(1))").get(60)
    assert "freed" in str(told.value)
    assert mesh.run("y = torch.ones(1); dist.all_reduce(y); y.item()").get(60).values() == [2.0, 2.0]


def test_an_interrupt_stops_ranks_and_keeps_what_they_have(mesh: ProcMesh) -> None:
    future: Any = mesh.run("import time\nkept = rank\ntime.sleep(60)")
    until_busy(mesh)
    assert future.interrupt().obeyed == (0, 1)
    assert mesh.pull("kept").get(60).values() == [0, 1]


def test_actors_answer_raise_and_are_interrupted(mesh: ProcMesh) -> None:
    counters = mesh.spawn("counters", Counter, 3)
    assert counters.add.call(2).get(60).values() == [5, 5]
    with pytest.raises(ActorError, match="bad shard"):
        counters.fail.call(1).get(60)
    sleepers = mesh.spawn("sleepers", Sleeper)
    assert sleepers.answer.call().get(60).values() == [42, 42]
    for sleep in (sleepers.sleep, sleepers.sleep_async):
        future = sleep.call()
        threading.Timer(1, os.kill, (os.getpid(), signal.SIGINT)).start()
        with pytest.raises(errors.CallInterrupted, match="ranks 0,1 stopped"):
            future.get(PATIENCE_S)
    assert sleepers.answer.call().get(60).values() == [42, 42]


def test_a_rank_that_was_killed_is_replaced(mesh: ProcMesh) -> None:
    pid = mesh.run("import os; os.getpid()").get(60).values()[1]
    mesh.run("kept = 'kept'").get(60)
    os.kill(pid, signal.SIGKILL)
    with pytest.raises(errors.MeshError, match="SIGKILL"):
        mesh.run("dist.barrier()").get(60)
    mesh.heal()
    assert mesh.run("z = torch.ones(1); dist.all_reduce(z); z.item()").get(60).values() == [2.0, 2.0]
    assert mesh.slice(gpus=0).pull("kept").get(60).values() == ["kept"]


@pytest.mark.slow
@pytest.mark.usefixtures("clients_loop")
@pytest.mark.parametrize("name", ["python3", "meshbook"])
def test_a_kernel_runs_mesh_cells_and_is_interrupted(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for variable in ("JUPYTER_CONFIG_DIR", "JUPYTER_DATA_DIR", "JUPYTER_RUNTIME_DIR", "IPYTHONDIR"):
        monkeypatch.setenv(variable, str(tmp_path / variable.lower()))
    monkeypatch.setenv("JUPYTER_PATH", str(tmp_path / "share" / "jupyter"))
    install = [sys.executable, "-m", "meshbook_kernel", "install", "--prefix", str(tmp_path)]
    subprocess.run(install, check=True, timeout=TIMEOUT_S)
    if name == "meshbook" and tuple(map(int, ipykernel.__version__.split(".")[:2])) < (6, 29):
        pytest.skip("our own kernel needs ipykernel 6.29; the extension works in the stock one")
    kernel = StockKernel(name)
    try:
        if name == "python3":
            run(kernel, "%load_ext meshbook")
        assert 'mesh "main": gpus=2' in run(kernel, "%mesh spawn gpus=2 --device cpu")
        summed = run(kernel, "%%mesh\nx = torch.ones(1) * rank\ndist.all_reduce(x)\nprint('sum', x.tolist())")
        # gloo of PyTorch 2.8 tells of its connections in the output of the cell that forms the group.
        assert [lines[-1:] for lines in by_rank(summed).values()] == [["sum [1.0]"]] * 2
        assert "ValueError: bad shard" in run(
            kernel, "%%mesh\nif rank == 1:\n    raise ValueError('bad shard')\ndist.barrier()"
        )
        request = kernel.client.execute("%%mesh\nprint('begun')\nimport time\ntime.sleep(60)", stop_on_error=False)
        wait_for(kernel, request, "begun")
        kernel.manager.interrupt_kernel()
        assert "stopped, all variables kept" in wait_for(kernel, request, "")
        kept = run(kernel, "%%mesh\nprint(x.tolist())")
        assert by_rank(kept) == each_of(2, "[1.0]"), kept
        run(kernel, "%mesh stop")
    finally:
        kernel.close()


def text_of(message: dict[str, Any]) -> str:
    """What a person reads of an output message."""
    content = message["content"]
    data = content.get("data", {}).get("text/plain", "")
    return str(content.get("text", data) or "\n".join(content.get("traceback", ())))


def run(kernel: StockKernel, code: str) -> str:
    """Run a cell; returns what it shows. The one sent after a failed cell runs too, however soon."""
    shown: list[str] = []

    def show(message: dict[str, Any]) -> None:
        shown.append(text_of(message))

    kernel.client.execute_interactive(
        code, timeout=PATIENCE_S, output_hook=show, allow_stdin=False, stop_on_error=False
    )
    return "\n".join(shown)


def wait_for(kernel: StockKernel, request: str, text: str) -> str:
    """Read what a running cell shows until it has shown ``text``, or, where that is empty, until it ends."""
    shown = ""
    while not text or text not in shown:
        message = kernel.client.get_iopub_msg(timeout=PATIENCE_S)
        if message["parent_header"].get("msg_id") == request:
            shown += text_of(message)
            if message["msg_type"] == "status" and message["content"]["execution_state"] == "idle":
                break
    return shown
