"""Meshes outlive their kernel: restart, kill -9, detach, the end of the Jupyter server; the next kernel finds them."""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import psutil
import pytest
from patience import wait_until

from tests.kernel.conftest import left_of
from tests.kernel.typed_cells import run_typing

pytestmark = [pytest.mark.kernel, pytest.mark.usefixtures("no_lasting_template", "own_folders")]

StartKernel = Callable[..., Any]
Watch = Callable[[Iterable[psutil.Process]], None]


def with_mesh(kernel: Any, watch: Watch, *cells: str) -> list[psutil.Process]:
    """Spawn two ranks and run ``cells``; returns all processes below the kernel."""
    for cell in ("%mesh spawn gpus=2 --device cpu", *cells):
        ran = kernel.run(cell)
        assert ran.ok, ran.reply
    family = [process for process in kernel.family() if process != kernel.process]
    watch(family)
    return family


def shown(cell: Any) -> list[str]:
    """The results of a cell, as text."""
    return [content["data"]["text/plain"] for kind, content in cell.messages if kind == "display_data"]


def end(kernel: Any, family: list[psutil.Process]) -> None:
    """Shut the kernel down as a person does; nothing is left."""
    kernel.manager.shutdown_kernel()
    assert not left_of(family)


def die(kernel: Any) -> None:
    kernel.process.kill()
    kernel.process.wait(10)


def come_back(kernel: Any, *, now: bool = True) -> None:
    kernel.manager.restart_kernel(now=now)
    kernel.client.wait_for_ready(timeout=60)


def die_and_come_back(kernel: Any, how: str) -> None:
    if how == "kill":
        die(kernel)
    come_back(kernel, now=how == "kill")


def test_the_next_kernel_stops_an_idle_mesh_as_asked(start_kernel: StartKernel, watch: Watch) -> None:
    kernel = start_kernel()
    assert kernel.run("%mesh spawn gpus=1 --no-torch --idle-stop 3s").ok
    family = [process for process in kernel.family() if process != kernel.process]
    watch(family)
    die_and_come_back(kernel, "kill")
    assert kernel.run("import time\nprocs = get_ipython()._meshbook_session.mesh(); procs.alive").ok
    kernel.run("deadline = time.monotonic() + 30\nwhile procs.alive and time.monotonic() < deadline: time.sleep(0.05)")
    assert kernel.run("print(procs.alive)").text("stdout") == "False\n"
    end(kernel, family)


@pytest.mark.parametrize("how", ["restart", "kill"])
def test_the_next_kernel_goes_on_with_the_mesh(start_kernel: StartKernel, watch: Watch, how: str) -> None:
    kernel = start_kernel()
    family = with_mesh(
        kernel, watch, "%%mesh\nkept = rank + 40", "%mesh slice first gpus=0", "%mesh rename gpus=dp",
        "%%mesh --async\nimport time\nfor i in range(4000):\n    time.sleep(0.05)\n    print('tick', i)",
    )  # fmt: skip
    started = time.monotonic()
    die_and_come_back(kernel, how)
    first = kernel.run("print('mine')", is_attended=True)
    assert time.monotonic() - started < 60
    said = first.text("stdout")
    assert said.startswith('attached to mesh "main" again: dp=2, cpu; cell 5 still runs on ranks 0,1 (job 1)\n'), said
    assert "mine\n" in said
    kernel.wait_for_text("tick")
    assert "job 1: running" in kernel.run("%mesh jobs").text()
    assert kernel.run("%mesh cancel 1").ok
    assert shown(kernel.run("%%mesh first\nkept")) == ["[0] 40"]
    assert all(process.is_running() for process in family)
    assert "attached" not in kernel.run("1").text()
    end(kernel, family)


@pytest.mark.parametrize("how", ["restart", "kill"])
def test_the_cells_of_earlier_kernels_are_exported_too(
    start_kernel: StartKernel, watch: Watch, own_folders: Path, how: str
) -> None:
    kernel = start_kernel()
    assert kernel.run("factor = 3").ok  # before there is a mesh
    family = with_mesh(kernel, watch, "%mesh push factor", "%%mesh gpus=1\nkept = factor * rank")
    die_and_come_back(kernel, how)
    assert kernel.run("%%mesh\nagain = factor + 1").ok
    ran = kernel.run(f"%mesh export {own_folders}/out.py")
    assert ran.ok, ran.text()
    script = (own_folders / "out.py").read_text()
    places = [script.index(each) for each in ("factor = 3", "    kept = factor * rank", "again = factor + 1")]
    assert places == sorted(places)
    end(kernel, family)


@pytest.mark.slow
def test_a_rank_that_is_stopped_at_a_prompt_waits_for_the_next_kernel(start_kernel: StartKernel, watch: Watch) -> None:
    kernel = start_kernel()
    family = with_mesh(kernel, watch)

    with pytest.raises(AssertionError, match="never asked for"):
        run_typing(kernel, "%%mesh\nx = rank\nif rank == 1: breakpoint()\ndist.barrier()", [die, "never"], limit_s=3)
    come_back(kernel)
    said = kernel.run("1").text("stdout")
    assert (
        "cell 2 still runs on ranks 0,1 (job 1)" in said and "rank 1 stopped at cell 2, line 3; look: %mesh pdb" in said
    )
    assert "[1] (Pdb) p x\n[1] 1\n" in run_typing(kernel, "%mesh pdb", ["p x", "c"]).plain
    assert kernel.run("%mesh wait 1").ok
    end(kernel, family)


def test_what_ended_meanwhile_is_shown_and_kept(start_kernel: StartKernel, watch: Watch, own_folders: Path) -> None:
    kernel = start_kernel()
    family = with_mesh(kernel, watch, f"%%mesh\nfrom pathlib import Path\nfolder = Path({str(own_folders)!r})")
    kernel.start(
        "%%mesh\nimport time\nprint('before', flush=True)\ntime.sleep(1.5)\nprint('while away', flush=True)\n"
        "(folder / f'ended-{rank}').touch()\nrank + 7"
    )
    kernel.wait_for_text("before")
    die(kernel)
    wait_until(lambda: len(list(own_folders.glob("ended-*"))) == 2, 60)
    time.sleep(1)  # from there to the reply
    come_back(kernel)
    first = kernel.run("print(_mesh.values())")
    assert "[0,1] while away" in first.text()
    assert "ended meanwhile: done; its result is in _mesh" in first.text()
    assert "[7, 8]" in first.text()
    end(kernel, family)


def test_a_cell_that_a_restart_interrupted_is_told_with_its_place(start_kernel: StartKernel, watch: Watch) -> None:
    kernel = start_kernel()
    family = with_mesh(kernel, watch)
    kernel.start("%%mesh\nimport time\nprint('before', flush=True)\nfor n in range(600): time.sleep(0.1)")
    kernel.wait_for_text("before")
    come_back(kernel, now=False)
    said = kernel.run("1").text("stdout").splitlines()
    assert said[1] == "  cell 2 was interrupted by the restart on ranks 0,1 at cell 2, line 4", said
    assert "cell 2 (earlier kernel)  interrupted at cell 2, line 4" in kernel.run("%mesh errors").text()
    assert int(shown(kernel.run("%%mesh rank=0\nn"))[0].removeprefix("[0] ")) < 599
    end(kernel, family)


def test_a_failure_meanwhile_is_told(start_kernel: StartKernel, watch: Watch) -> None:
    kernel = start_kernel()
    family = with_mesh(kernel, watch)
    kernel.start(
        "%%mesh\nimport time\nprint('before', flush=True)\ntime.sleep(1)\nif rank: raise ValueError('oh')\nrank"
    )
    kernel.wait_for_text("before")
    die(kernel)
    time.sleep(2)
    come_back(kernel)
    first = kernel.run("1")
    told = first.text() + str(first.messages)
    if "ended meanwhile: failed: " not in told:  # its groups were still being compared: it came back as a job
        assert "cell 2 still runs" in told
        waited = kernel.run("%mesh wait 1")
        told += waited.text() + str(waited.messages) + str(waited.reply)
    assert "ValueError: oh" in told
    end(kernel, family)


def test_run_all_after_a_restart_goes_on_with_the_mesh(start_kernel: StartKernel, watch: Watch) -> None:
    kernel = start_kernel()
    family = with_mesh(kernel, watch, "%%mesh\nkept = rank")
    assert not kernel.run("%%mesh\nraise ValueError('before')").ok
    die_and_come_back(kernel, "restart")
    again = kernel.run("%mesh spawn gpus=2 --device cpu")
    assert again.ok, again.reply
    assert "here from before the restart, with its state" in again.text()
    assert kernel.run("%%mesh\nkept").ok
    other = kernel.run("%mesh spawn gpus=3 --device cpu")
    assert not other.ok
    assert 'mesh "main" runs already' in str(other.reply["traceback"])
    assert not kernel.run("%%mesh\nraise ValueError('after')").ok
    after, before = (line for line in kernel.run("%mesh errors").text().splitlines() if "ValueError" in line)
    assert "ValueError: before" in before and "(earlier kernel)" in before, before
    assert "ValueError: after" in after and "earlier" not in after, after
    end(kernel, family)


def test_a_detached_mesh_waits_for_another_kernel(start_kernel: StartKernel, watch: Watch) -> None:
    one, two = start_kernel(), start_kernel()
    family = with_mesh(one, watch, "%%mesh\nkept = rank + 5", "%mesh slice last gpus=1")
    listed = two.run("%mesh list").text()
    assert re.search(rf"main: gpus=2, up \d+ s; belongs to process {one.process.pid}\n", listed), listed
    refused = two.run("%mesh attach main")
    assert not refused.ok
    assert "run %mesh detach there" in str(refused.reply["traceback"])
    detached = one.run("%mesh detach --lease 2h").text()
    assert 'mesh "main" lives on for 2 h without this notebook' in detached
    assert "%mesh attach main" in detached
    assert not one.run("%%mesh\n1").ok
    one.manager.shutdown_kernel()
    assert all(process.is_running() for process in family)
    assert re.search(r"waits for (2 h|1 h 59 min) more\n      %mesh attach main\n", two.run("%mesh list").text())
    with_mesh(two, watch)
    assert two.run("%mesh detach").ok
    assert two.run("%mesh attach main").ok  # its own comes first
    refused = two.run("%mesh attach main")
    assert 'mesh "main" runs already' in str(refused.reply["traceback"])
    assert two.run("%mesh stop").ok
    refused = two.run("%mesh attach")
    assert "this notebook has left no mesh, others have; say which:" in str(refused.reply["traceback"])
    attached = two.run("%mesh attach main --as theirs")
    assert attached.ok, attached.reply
    assert 'attached to mesh "theirs": gpus=2, cpu' in attached.text()
    assert 'mesh "theirs" is current now; left by another notebook; it waits again, for 2 h,' in attached.text()
    assert shown(two.run("%%mesh gpus=1\nkept")) == ["[1] 6"]
    own = with_mesh(two, watch)
    end(two, own)
    assert all(process.is_running() for process in family)
    three = start_kernel()
    assert three.run("%mesh attach main").ok or three.run("%mesh attach theirs").ok
    assert shown(three.run("%%mesh gpus=1\nkept")) == ["[1] 6"]
    assert three.run("%mesh stop").ok
    end(three, family)


def test_a_mesh_that_ended_meanwhile_is_told_with_the_reason(
    start_kernel: StartKernel, watch: Watch, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MESHBOOK_LEASE_S", "1")
    kernel = start_kernel()
    family = with_mesh(kernel, watch)
    die(kernel)
    assert not left_of(family, 60)  # an agent that a busy machine has stopped for 5 s counts its lease again
    come_back(kernel)
    first = kernel.run("1").text()
    assert 'mesh "main" of the last kernel has ended: no controller came within the lease of 1 s' in first
    assert "%mesh spawn gpus=4" in first
    assert kernel.run("2").text() == ""
    die_and_come_back(kernel, "restart")
    assert kernel.run("3").text() == ""


def test_the_stock_kernel_finds_its_mesh_when_the_extension_is_loaded(start_kernel: StartKernel, watch: Watch) -> None:
    kernel = start_kernel("python3")
    assert kernel.run("%load_ext meshbook").ok
    family = with_mesh(kernel, watch, "%%mesh\nkept = rank")
    die_and_come_back(kernel, "kill")
    assert kernel.run("%load_ext meshbook").ok
    assert 'attached to mesh "main" again: gpus=2, cpu' in kernel.run("1").text()
    end(kernel, family)


def test_a_restart_of_the_stock_kernel_says_that_it_ended_the_mesh(start_kernel: StartKernel, watch: Watch) -> None:
    kernel = start_kernel("python3")
    assert kernel.run("%load_ext meshbook").ok
    family = with_mesh(kernel, watch)
    die_and_come_back(kernel, "restart")
    assert kernel.run("%load_ext meshbook").ok
    said = kernel.run("1").text()
    assert 'mesh "main" of the last kernel has ended: ' in said
    assert "as a restart of other kernels than Meshbook's does" in said
    end(kernel, family)


def test_the_next_kernel_knows_the_last_save(start_kernel: StartKernel, watch: Watch, tmp_path: Path) -> None:
    kernel = start_kernel()
    family = with_mesh(kernel, watch, "%%mesh --setup\nx, step = rank, 4", f"%mesh save {tmp_path}/ckpt --every 1h")
    die_and_come_back(kernel, "kill")
    assert kernel.run("%%mesh\nx = 7; import os, signal; rank and os.kill(os.getpid(), signal.SIGKILL)").reply
    told = kernel.run("%mesh heal --restore")
    assert told.ok and "restored x, step on ranks 0,1 from save-1, step 4" in told.text("stdout"), told.messages
    assert shown(kernel.run("%%mesh\nx, step")) == ["[0] (0, 4)", "[1] (1, 4)"]
    kernel.run("%mesh save --stop")
    end(kernel, family)
