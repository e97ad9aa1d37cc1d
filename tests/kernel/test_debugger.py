"""pdb on ranks, typed at as in a notebook: each cell's stdin is answered with what a person would type."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import nbformat
import pytest

from tests.kernel.conftest import Kernel
from tests.kernel.typed_cells import run_typing

TWO_STOP = """%%mesh
x = rank * 10
if rank in (1, 2):
    breakpoint()
    x += 1
t = torch.ones(1)
dist.all_reduce(t)
x"""


@pytest.fixture(scope="module")
def kernel(shared_kernel: Kernel) -> Kernel:
    assert shared_kernel.run("%mesh spawn gpus=4 --device cpu").ok
    return shared_kernel


def test_a_breakpoint_opens_the_prompt_in_the_running_cell(kernel: Kernel) -> None:
    cell = run_typing(
        kernel, TWO_STOP, ["p x", "l", "w", "n", "s", "?ra", "cast p x", "rank 2", "p x", "ranks", "help", "c", "c"]
    )
    text = cell.plain
    assert cell.ok, text
    assert "ranks 1,2 stopped at cell 2, line 4\n" in text
    assert "[1] > <cell 2>(4)<module>()\n[1] -> breakpoint()\n[1] (Pdb) p x\n[1] 10\n" in text
    assert "[1]   4  ->\t    breakpoint()\n" in text
    assert "[1] (Pdb) n\n[1] > <cell 2>(5)<module>()\n[1] -> x += 1\n" in text
    assert "[1] (Pdb) s\n[1] > <cell 2>(6)<module>()\n[1] -> t = torch.ones(1)\n" in text
    assert "[1] range  rank\n" in text
    assert "[1] (Pdb) cast p x\n[1] 11\n[2] 20\n" in text
    assert "[1] (Pdb) rank 2\nrank 2 stopped at cell 2, line 4\n[2] (Pdb) p x\n[2] 20\n" in text
    assert "  [0,3]  in all_reduce (cell 2, line 7)\n" in text
    assert "  [2]    stopped at cell 2, line 4    <- this prompt\n" in text
    assert text.index("cast CMD [TARGET]") < text.index("Documented commands"), "help has ours first"
    assert cell.prompts[0] == "[1] (Pdb) " and cell.prompts[-2:] == ["[2] (Pdb) ", "[1] (Pdb) "]
    assert kernel.value("list(_mesh.values())") == "[0, 11, 21, 30]"


def test_q_ends_the_cell_on_its_rank_quietly_and_frees_the_others(kernel: Kernel) -> None:
    cell = run_typing(kernel, "%%mesh\nif rank == 1: breakpoint()\nt = torch.ones(1)\ndist.all_reduce(t)", ["q"])
    assert not cell.ok
    assert "BdbQuit" in cell.reply["ename"] or "BdbQuit" in cell.reply["evalue"]
    shown = re.sub(r"\x1b\[[0-9;]*m", "", "\n".join("\n".join(c.get("traceback", [])) for _, c in cell.messages))
    assert "ended by q at its prompt" in shown and "site-packages" not in shown
    assert "ranks 0,2,3 were waiting in all_reduce" in shown
    assert kernel.run("%%mesh\nt = torch.ones(1); dist.all_reduce(t); assert t.item() == 4").ok


def test_interrupt_at_the_prompt_ends_the_debugging(kernel: Kernel) -> None:
    pressed = []

    def press(kernel: Kernel) -> None:
        pressed.append(time.monotonic())
        kernel.manager.interrupt_kernel()

    cell = run_typing(kernel, TWO_STOP, [press])
    assert not cell.ok and "Interrupt" in cell.reply["ename"], cell.reply
    assert time.monotonic() - pressed[0] < 10
    assert kernel.run("%%mesh\nt = torch.ones(1); dist.all_reduce(t); assert t.item() == 4").ok
    assert "none of ranks 0-3 is stopped" in kernel.run('%mesh pdb --cast "p x"').reply["evalue"]


def test_detach_leaves_ranks_stopped_and_the_next_prompt_finds_them(kernel: Kernel) -> None:
    cell = run_typing(kernel, TWO_STOP, ["detach"])
    assert cell.ok and "ranks 1,2 stay stopped; %mesh pdb opens the prompt again" in cell.plain
    assert "job 1 runs on ranks 0-3" in cell.plain
    status = kernel.run("%mesh status --text").text()
    assert re.search(r"^1 .* pdb .* cell \d+, line 4$", status, re.M), status
    cast = kernel.run('%mesh pdb --cast "p x" rank=1,2')
    assert cast.ok and "[1] 10\n[2] 20\n" in cast.text()
    again = run_typing(kernel, "%mesh pdb", ["p rank", "cast c"])
    assert again.ok and re.match(r"rank 1 stopped at cell \d+, line 4\n\[1\] \(Pdb\) p rank", again.plain), again.plain
    assert kernel.run("%mesh wait 1").ok


def test_a_background_cell_tells_where_it_stopped(kernel: Kernel) -> None:
    run_typing(kernel, "%%mesh --async rank=2\nbreakpoint()\ny = 5", [])
    kernel.wait_for_text("look: %mesh pdb")
    cell = run_typing(kernel, "%mesh pdb", ["p rank", "c"])
    assert cell.ok and "[2] 2\n" in cell.plain
    assert kernel.run("%mesh wait").ok


def test_a_running_rank_is_stopped_at_its_next_line(kernel: Kernel) -> None:
    kernel.run("%%mesh --async rank=3\nimport time\ngo = True\nwhile go:\n    time.sleep(0.05)")
    cell = run_typing(kernel, "%mesh pdb rank=3", ["!go = False", "c"])
    assert cell.ok and re.search(r"rank 3 stopped at cell \d+, line [45]", cell.plain), cell.plain
    assert kernel.run("%mesh wait").ok
    idle = run_typing(kernel, "%mesh pdb rank=3", [])
    assert "rank 3 is not running anything" in idle.reply["evalue"]


def test_postmortem_begins_with_the_rank_that_failed_first(kernel: Kernel) -> None:
    code = """%%mesh
def load(shard):
    if rank == 2:
        raise ValueError(f"bad shard {shard}")
    dist.barrier()
load(7)"""
    assert not kernel.run(code).ok
    assert kernel.run("%%mesh\nafter = 1").ok
    cell = run_typing(kernel, "%mesh postmortem", ["p shard", "rank 0", "cast p shard", "d", "q"])
    assert cell.ok, cell.plain
    assert re.search(r"rank 2 post-mortem of ValueError: bad shard 7, at cell \d+, line 4", cell.plain), cell.plain
    assert "[2] (Pdb) p shard\n[2] 7\n" in cell.plain
    assert "ranks 0,1,3 post-mortem of GroupAborted: the process groups were aborted" in cell.plain
    assert re.search(r"\[0\] \(Pdb\) cast p shard\n\[0-3\] 7\n.*\[0\] > .*c10d_logger.py", cell.plain, re.S), cell.plain
    cast = kernel.run('%mesh postmortem 2 --cast "p shard"')
    assert cast.ok and "[0-3] 7\n" in cast.text()
    assert kernel.run("%%mesh\nt = torch.ones(1); dist.all_reduce(t); assert t.item() == 4").ok


def test_a_call_that_is_waited_for_opens_the_prompt_too(kernel: Kernel) -> None:
    code = """def f(x):
    import os
    if os.environ["RANK"] == "1":
        breakpoint()
    return x
session = get_ipython()._meshbook_session
print(list(session.mesh().execute(f, 5).get().values()))"""
    cell = run_typing(kernel, code, ["p x", "x = 8", "c"])
    assert "[1] -> breakpoint()\n" in cell.plain
    assert cell.ok and "[1] 5\n" in cell.plain and "[5, 8, 5, 5]" in cell.plain, cell.plain


def test_headless_cells_fail_at_the_breakpoint(kernel: Kernel) -> None:
    cell = kernel.run("%%mesh\ny = 1\nbreakpoint()")
    assert not cell.ok
    assert "nobody could type at its prompt" in cell.reply["evalue"]
    assert "line 3" in cell.reply["evalue"]


def test_the_death_of_a_stopped_rank_closes_its_prompt(kernel: Kernel) -> None:
    pid = int(kernel.run("%%mesh\nimport os; print('pid', os.getpid())").text().split("[1] pid ")[1].split()[0])

    def kill(kernel: Kernel) -> None:
        os.kill(pid, signal.SIGKILL)

    cell = run_typing(kernel, "%%mesh\nif rank == 1: breakpoint()", [kill])
    assert not cell.ok and "WorkerLost" in cell.reply["ename"]
    assert kernel.run("%mesh heal").ok


def test_a_line_for_a_rank_that_died_meanwhile_goes_to_nobody(kernel: Kernel) -> None:
    pids = kernel.run("%%mesh\nimport os; print('pid', os.getpid())").text()
    pid = int(pids.split("[2] pid ")[1].split()[0])

    def kill_then_type(kernel: Kernel) -> None:
        os.kill(pid, signal.SIGKILL)
        kernel.wait_for_text("rank 2 has ended; Enter goes to rank 3")
        kernel.client.input("c")

    cell = run_typing(kernel, "%%mesh rank=2,3\nbreakpoint()", [kill_then_type, "p rank", "c"])
    assert "rank 2 has ended; not sent: c" in cell.plain and "[3] (Pdb) p rank\n[3] 3\n" in cell.plain
    assert not cell.ok and "WorkerLost" in cell.reply["ename"]
    assert kernel.run("%mesh heal").ok


@pytest.mark.slow
def test_nbclient_gets_an_error_at_the_breakpoint(installed_kernelspec: object, tmp_path: Path) -> None:
    notebook = nbformat.v4.new_notebook(
        cells=[
            nbformat.v4.new_code_cell("%mesh spawn gpus=2 --device cpu"),
            nbformat.v4.new_code_cell("%%mesh\nx = 1\nbreakpoint()"),
        ],
        metadata={"kernelspec": {"name": "meshbook", "display_name": "Meshbook", "language": "python"}},
    )
    path = tmp_path / "stops.ipynb"
    nbformat.write(notebook, path)
    command = [sys.executable, "-m", "jupyter", "execute", str(path), "--timeout=60"]
    ran = subprocess.run(command, capture_output=True, text=True, timeout=100)
    assert ran.returncode != 0
    assert "this notebook runs without a person at it" in ran.stderr and "line 3" in ran.stderr, ran.stderr
