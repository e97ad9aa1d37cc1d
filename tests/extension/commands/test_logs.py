"""``%mesh logs`` on real ranks: the last lines, a search, and following what is written."""

from __future__ import annotations

import pytest
from patience import interrupt_when


def test_logs_have_what_ranks_wrote(notebook) -> None:
    notebook.run("%%mesh\nfor i in range(30): print('line', i)")
    text = notebook.run("%mesh logs gpus=1 -n 2").stdout
    head, *lines = text.splitlines()
    assert head.startswith("[1] /") and lines == ["line 28", "line 29"]


def test_logs_can_be_searched(notebook) -> None:
    notebook.run("%%mesh\nfor i in range(30): print('step', i, 'nan' if i % 10 == rank else 'fine')")
    lines = notebook.run("%mesh logs gpus=0:2 -n 2 --grep nan").stdout.splitlines()
    assert lines[1:3] == ["step 10 nan", "step 20 nan"] and lines[4:] == ["step 11 nan", "step 21 nan"]
    assert 'no line with "never" among' in notebook.run("%mesh logs gpus=0 --grep never").stdout


def test_logs_of_a_running_job_are_followed_for_a_while(notebook) -> None:
    notebook.run("%%mesh --async\nimport time\nfor i in range(40):\n    print('beat', i, flush=True); time.sleep(0.05)")
    ran = notebook.run("%mesh logs --for 1s -n 0")
    head, *lines = ran.stdout.splitlines()
    assert head == "following ranks 0-3: for 1 s"
    notebook.run("%mesh wait")
    assert any(line.startswith("[0-3] beat ") for line in lines), ran.stdout
    assert not any("left out" in line for line in lines)
    assert "0s is no time at all" in notebook.fail("%mesh logs --for 0s")


def test_following_ends_quietly_at_an_interrupt(notebook) -> None:
    notebook.run("%%mesh\nprint('said before by', rank)")
    thread = interrupt_when(lambda: True, 0.7)
    ran = notebook.run("%mesh logs -f rank=1,2 -n 1 --grep before")
    thread.join()
    assert ran.stdout == "following ranks 1,2: interrupt to end\n[1] said before by 1\n[2] said before by 2\n"


@pytest.mark.slow
def test_a_flood_that_is_followed_is_bounded_and_says_what_it_left_out(notebook) -> None:
    notebook.run("%%mesh --async\nfor i in range(60_000): print(rank, 'x' * 80)")
    ran = notebook.run("%mesh logs --for 2s")
    notebook.run("%mesh wait")
    assert len(ran.stdout) < 400_000
    assert "left out, as it came too fast: " in ran.stdout or "the cell is full" in ran.stdout
