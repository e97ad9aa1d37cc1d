"""What the person sees of a hanging cell, of failures, and of what failures hold: on real ranks."""

from __future__ import annotations

import os
import re
import signal
import time
from collections.abc import Iterator

import pytest
from patience import wait_until

from meshbook_extension.output.publisher import StreamSink

STEP = """%%mesh --async
import time
def step():
    if rank == 3:
        time.sleep(60)
    dist.all_reduce(torch.ones(1))
step()"""


@pytest.fixture
def job(notebook) -> Iterator[int]:
    """A job whose rank 3 sleeps while the others wait for it."""
    number = int(re.search(r"job (\d+) runs", notebook.run(STEP).stdout)[1])
    wait_until(lambda: notebook.run("%mesh stacks").stdout.startswith("ranks 0-2 wait in all_reduce"))
    yield number
    notebook.run(f"%mesh cancel {number}")
    notebook.try_to_run(f"%mesh wait {number} --timeout 20")
    notebook.run("%%mesh\ndist.barrier()")


def test_mesh_stacks_names_the_odd_rank_and_shows_the_lines_of_the_notebook(notebook, job) -> None:
    text = notebook.run("%mesh stacks").stdout
    cell = re.search(r"cell \d+", text)[0]
    head, odd, _, *blocks = text.splitlines()
    assert re.fullmatch(rf"ranks 0-2 wait in all_reduce \({cell}, line 6\), operation \d+;", head)
    assert re.fullmatch(rf"  rank 3 has issued \d+ and is in time.sleep \({cell}, line 5\)", odd)
    assert re.fullmatch(rf"\[3\] busy for [\d.]+ s, in time.sleep \({cell}, line 5\)", blocks[0])
    assert blocks[1:3] == [f"    {cell}, line 7  <module>  step()", f"    {cell}, line 5  step      time.sleep(60)"]
    assert re.fullmatch(rf"\[0-2\] waiting in all_reduce \({cell}, line 6\) for [\d.]+ s, operation \d+", blocks[3])
    assert "ipython.py" not in text
    more = notebook.run("%mesh stacks rank=3 --all-frames --all-threads").stdout
    assert "ipython.py" in more and "[0-2]" not in more


def test_a_job_that_hangs_says_so_and_how_to_end_it(notebook, job, monkeypatch: pytest.MonkeyPatch) -> None:
    written: list[str] = []
    monkeypatch.setattr(StreamSink, "stream", lambda sink, name, text: written.append(text))
    wait_until(lambda: any("look: %mesh stacks" in text for text in written))
    text = "".join(written)
    assert re.search(rf"for [\d.]+ s now    look: %mesh stacks    stop: %mesh cancel {job}\n", text), text


def test_mesh_stacks_of_idle_ranks_is_one_line(notebook) -> None:
    assert notebook.run("%mesh stacks").stdout == "[0-3] idle\n"


# ---- errors ------------------------------------------------------------------------------------------------------


def test_errors_are_listed_once_newest_first_and_shown_in_full_by_number(notebook) -> None:
    notebook.fail("%%mesh\nif rank < 2:\n    raise ValueError('bad shard\\nsecond line')")
    notebook.fail("%mesh eval undefined_name + 1")
    newest, older = notebook.run("%mesh errors -n 2").stdout.splitlines()[:2]
    assert re.fullmatch(
        r" *\d+ +\d\d:\d\d:\d\d +\[[0-3,-]+\] +cell \d+ +NameError: name 'undefined_name' is not .*", newest
    )
    found = re.fullmatch(r" *(\d+) +\S+ +\[0,1\] +(cell \d+) +ValueError: bad shard \((cell \d+), line 3\)", older)
    assert found and found[2] == found[3], older
    full = notebook.run(f"%mesh errors {found[1]}").stdout
    assert full.startswith(f"{found[1]}  ") and "raise ValueError('bad shard" in full and "second line" in full
    assert notebook.run("%mesh errors rank=1 -n 9").stdout.count("ValueError: bad shard") == 1
    assert "ValueError: bad shard" not in notebook.run("%mesh errors rank=3 -n 9").stdout
    assert "Traceback" in notebook.run("%mesh errors -n 1 --full").stdout


def test_errors_of_jobs_are_kept_and_waiting_for_one_does_not_repeat_it(notebook) -> None:
    job = re.search(r"job (\d+)", notebook.run("%%mesh --async\nif rank == 2:\n    1 / 0").stdout)[1]
    notebook.fail(f"%mesh wait {job}")
    text = notebook.run("%mesh errors").stdout
    assert len(re.findall(r"\[2\] +cell \d+ +ZeroDivisionError: division by zero \(cell \d+, line 3\)", text)) == 1


def test_interrupted_ranks_are_listed_with_their_place(notebook) -> None:
    notebook.fail("%%mesh --timeout 1\nimport time\nif rank < 2: time.sleep(60)\ntime.sleep(60)")
    text = notebook.run("%mesh errors -n 1").stdout
    assert re.search(
        r"\[0-3\]  (cell \d+)  interrupted \(ranks 0,1 at \1, line 3; ranks 2,3 at \1, line 4\)\n", text
    ), text


def test_a_number_that_is_not_kept_is_answered_with_those_that_are(notebook) -> None:
    assert "there is no error 9999: " in notebook.fail("%mesh errors 9999")


def test_the_end_of_an_idle_rank_is_listed_with_its_cause(notebook) -> None:
    procs = notebook.shell._meshbook_session.mesh()
    os.kill(procs.status()[1].pid, signal.SIGKILL)
    wait_until(lambda: procs.lost)
    text = notebook.run("%mesh errors").stdout
    assert re.match(r" *\d+ +\S+ +\[1\] +idle +ended: killed by SIGKILL", text), text
    assert text == notebook.run("%mesh errors").stdout
    notebook.run("%mesh heal")


# ---- what failures hold ------------------------------------------------------------------------------------------

HOLDS = """%%mesh
def fill():
    x = torch.ones(25_000_000)
    y = [x[5:], torch.ones(10)]
    raise ValueError("bad shard")
if rank == 1:
    fill()"""


def test_free_lets_go_of_what_the_frames_of_a_failure_hold(notebook) -> None:
    notebook.run("%mesh free")
    notebook.fail(HOLDS)
    wait_until(lambda: "100 MB" in notebook.run("%mesh status").stdout)
    table = notebook.run("%mesh status").stdout
    assert "held by its last error" in table and table.count("100 MB") == 1
    text = notebook.run("%mesh free").stdout
    assert re.search(
        r"^\[1\] the frames of ValueError are let go: they held 100 MB; the process is \S+ MB smaller$", text, re.M
    )
    assert "[0,2,3] nothing to let go\n" in text
    assert notebook.run("%mesh free rank=1").stdout == "[1] nothing to let go\n"
    assert "last error" not in notebook.run("%mesh status").stdout


def test_free_leaves_busy_ranks_alone(notebook) -> None:
    notebook.run("%%mesh --async\nimport time\nif rank == 2: time.sleep(2)")
    time.sleep(0.5)
    text = notebook.run("%mesh free").stdout
    assert text.endswith("rank 2 is busy: free what it holds afterwards\n") and "[0,1,3] nothing to let go" in text
    notebook.run("%mesh wait")


def test_an_out_of_memory_error_says_what_kept_frames_hold(notebook) -> None:
    notebook.fail(HOLDS)
    code = "%%mesh rank=1\ndef grow():\n    z = torch.ones(5_000_000)\n    torch.empty(1 << 60)\ngrow()"
    text = notebook.fail(code)
    assert "the frames of the ValueError before it, kept for a post-mortem, held 100 MB; they are let go now" in text
    assert "the frames of this error hold 20 MB; the next cell lets them go, or now: %mesh free\n" in text
    assert "they held 20 MB" in notebook.run("%mesh free rank=1").stdout
    assert "hold little" in notebook.fail("%%mesh rank=0\nbytearray(1 << 60)")


def test_a_cell_that_awaits_is_shown_where_it_awaits(notebook) -> None:
    notebook.run("%%mesh --async\nimport asyncio\nasync def fetch():\n    await asyncio.sleep(2)\nawait fetch()")
    time.sleep(0.7)
    text = notebook.run("%mesh stacks").stdout
    cell = re.search(r"cell \d+", text)[0]
    head, *frames = text.splitlines()
    assert re.fullmatch(rf"\[0-3\] busy for [\d.]+ s, awaiting at {cell}, line 4", head), text
    assert frames[0] == f"    {cell}, line 5  <module>  await fetch()"
    assert frames[1] == f"    {cell}, line 4  fetch     await asyncio.sleep(2)"
    notebook.run("%mesh wait")
