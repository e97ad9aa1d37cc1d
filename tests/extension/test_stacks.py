"""What the person sees of a hanging cell, of failures, and of what failures hold: on real ranks."""

from __future__ import annotations

import re
import time
from collections.abc import Iterator

import pytest

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
    time.sleep(1.5)
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
    assert "rank_ipython" not in text
    more = notebook.run("%mesh stacks rank=3 --all-frames --all-threads").stdout
    assert "rank_ipython.py" in more and "[0-2]" not in more


def test_mesh_stacks_of_idle_ranks_is_one_line(notebook) -> None:
    assert notebook.run("%mesh stacks").stdout == "[0-3] idle\n"
