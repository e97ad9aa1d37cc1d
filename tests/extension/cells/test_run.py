"""``%%mesh`` on real ranks: results, errors, interrupts, jobs."""

from __future__ import annotations

import os
import re
import signal
import threading
import time
from pathlib import Path
from typing import Any

import pytest
from patience import interrupt_when, wait_until
from rank_lines import by_rank, each_of

from meshbook import errors
from meshbook.shape.value_mesh import ValueMesh
from meshbook_extension.cells.prompt import CellPrompt
from meshbook_extension.cells.running import CellTimeout, RunningCell


def test_the_last_expression_is_shown_and_kept(notebook) -> None:
    ran = notebook.run("%%mesh\nx = rank * 2\nprint('hello')\nx")
    assert by_rank(ran.stdout) == each_of(4, "hello")
    assert ran.plain == "[0] 0\n[1] 2\n[2] 4\n[3] 6\n"
    assert isinstance(notebook["_mesh"], ValueMesh)
    assert notebook["_mesh"].values() == [0, 2, 4, 6]


def test_a_cell_without_a_last_expression_shows_nothing(notebook) -> None:
    ran = notebook.run("%%mesh\ny = 1\nNone")
    assert (ran.stdout, ran.stderr, ran.displays) == ("", "", [])
    assert notebook["_mesh"].values() == [None] * 4


def test_targets_choose_ranks(notebook) -> None:
    notebook.run("%%mesh gpus=1:3 --out part\nrank")
    assert notebook["part"].ranks == (1, 2)
    assert notebook["part"].sizes == {"gpus": 2}
    notebook.run("%%mesh rank=-1\nrank")
    assert notebook["_mesh"].values() == [3]


def test_names_in_braces_stand_for_variables_of_the_notebook(notebook) -> None:
    notebook.run("which = 2")
    notebook.run("%%mesh gpus={which}\nrank")
    assert notebook["_mesh"].values() == [2]


def test_c_level_output_and_stderr_are_caught(notebook) -> None:
    ran = notebook.run("%%mesh\nimport os, sys\nos.write(1, b'from C\\n')\nprint('careful', file=sys.stderr);")
    assert [lines[0] for lines in by_rank(ran.stdout).values()] == ["from C"] * 4
    assert by_rank(ran.stderr) == each_of(4, "careful")


def test_rich_results_are_a_grid_of_equal_ones(notebook) -> None:
    code = "class Page:\n    def _repr_html_(self): return f'<b>{rank % 2}</b>'\nPage()"
    (grid,) = notebook.run(f"%%mesh\n{code}").displays
    assert re.findall(r"<span[^>]*>([^<]*)<.*?<b>(\d)</b>", grid["text/html"]) == [
        ("[0,2] same", "0"),
        ("[1,3] same", "1"),
    ]


def test_grouping_can_be_chosen(notebook) -> None:
    blocks = notebook.run("%%mesh --group rank\nprint('a'); print('b')").stdout
    assert blocks == "".join(f"[{rank}] a\n[{rank}] b\n" for rank in range(4))
    lines = notebook.run("%%mesh --group none\nprint('a')").stdout
    assert sorted(lines.splitlines()) == [f"[{rank}] a" for rank in range(4)]


def test_time_is_told_on_request(notebook) -> None:
    ran = notebook.run("%%mesh --time\nimport time\ntime.sleep(0.05 * rank)")
    assert ran.stdout.startswith("[0-3] 0.1") and "(slowest rank 3: 0.1" in ran.stdout and "median 0.0" in ran.stdout
    assert [line.split()[:2] for line in ran.stdout.splitlines()[1:]] == [["rank", str(rank)] for rank in range(4)]


def test_time_tells_own_work_from_waiting_in_collectives(notebook) -> None:
    cell = "import time\ntime.sleep(0.6 if rank == 2 else 0.1)\ndist.barrier()"
    ran = notebook.run(f"%%mesh --time\n{cell}")
    assert "(slowest rank 2: 0.6" in ran.stdout and " s of own work, median 0.1" in ran.stdout
    rows = ran.stdout.splitlines()[1:]
    assert rows[2].endswith("slowest") and "░" in rows[0] and rows[0].count("█") < rows[2].count("█")
    assert "own work" in rows[4]
    job = notebook.run(f"%%mesh --time --async\n{cell}")
    assert notebook.run("%mesh wait") and job.error is None


# ---- errors --------------------------------------------------------------------------------------------------------


def test_a_failing_rank_fails_the_cell_and_its_traceback_is_shown_once(notebook) -> None:
    text = notebook.fail("%%mesh\nif rank == 1:\n    raise ValueError('bad shard')\nrank")
    assert text.count("Traceback (most recent call last)") == 1
    assert text.startswith("rank 1 raised ValueError: bad shard\n")  # results are displays
    assert "----> 3     raise ValueError('bad shard')" in text
    last = text.splitlines()[-2:]
    assert last[0].startswith("CallFailed: rank 1 raised ValueError: bad shard (cell ")
    assert last[0].endswith(", line 3)")
    assert last[1] == "  ranks 0,2,3 finished; results in _mesh"
    assert notebook["_mesh"].ranks == (0, 2, 3) and notebook["_mesh"].values() == [0, 2, 3]


def test_equal_tracebacks_are_shown_once_with_their_ranks(notebook) -> None:
    text = notebook.fail("%%mesh\ndist.barrier()\n1 / 0")
    assert " raised ZeroDivisionError: division by zero\n" in text.splitlines(keepends=True)[0]
    assert "CallFailed: ranks 0-3 raised ZeroDivisionError: division by zero (cell " in text
    assert text.count("Traceback (most recent call last)") == 1
    assert notebook["_mesh"] is None


def test_a_syntax_error_is_found_before_anything_runs(notebook) -> None:
    notebook.run("%%mesh\nflag = 0")
    text = notebook.fail("%%mesh\nflag = 1\nx = = 2")
    assert "line 3\n    x = = 2\n" in text and text.endswith("nothing was run on the ranks\n")
    notebook.run("%%mesh\nflag")
    assert notebook["_mesh"].values() == [0] * 4


def test_a_collective_of_a_part_is_refused_on_request(notebook) -> None:
    text = notebook.fail("%%mesh gpus=0 --no-collective\ndist.all_reduce(torch.ones(1))")
    assert "rank 0 raised" in text and "collective" in text


def test_a_dead_rank_fails_the_cell_and_others_keep_their_state(empty_notebook) -> None:
    notebook = empty_notebook
    notebook.run("%mesh spawn gpus=2 --device cpu --name short --no-group")
    try:
        notebook.run("%%mesh\nkept = rank")
        text = notebook.fail("%%mesh\nimport os, signal\nif rank == 1: os.kill(os.getpid(), signal.SIGKILL)")
        assert "rank 1 on " in text and "killed by SIGKILL" in text
        steps = "repair: %mesh heal    go on without: %mesh shrink    its log: %mesh logs rank=1"
        assert text.splitlines()[-1] == f"  rank 0 keeps its state    {steps}"
        assert text.splitlines()[-2].endswith("; rank 0 finished; results in _mesh")
        notebook.run("%%mesh gpus=0\nkept")
        assert notebook["_mesh"].values() == [0]
        assert "dead" in notebook.run("%mesh").stdout
        assert "WorkerLost: rank 1" in notebook.fail("%%mesh\nkept")
    finally:
        notebook.run("%mesh stop short")


@pytest.mark.parametrize(
    ("code", "text"), [("exit()", "sys.exit()"), ("raise SystemExit('enough')", "sys.exit('enough')")]
)
def test_an_early_end_that_was_meant_takes_one_line(notebook, code: str, text: str) -> None:
    ran = notebook.try_to_run(f"# stop here\n%%mesh\n{code}")
    said = f"{text} ended the cell, not the rank. End the ranks with: %mesh stop"
    where = f"(cell {notebook.shell.execution_count - 1}, line 3)"
    assert ran.stdout == f"CallFailed: ranks 0-3 raised SystemExit: {said} {where}\n" and ran.stderr == ""
    assert "sys.exit(2)" in notebook.fail("%%mesh\nimport sys\nsys.exit(2)").partition("-> 3")[2]


def test_a_target_without_its_axis_says_how_it_is_written(notebook) -> None:
    assert "0 of what? Name the axis: gpus=0, or rank=0 for ranks by their number." in notebook.fail("%%mesh 0\nrank")
    assert "lr=0.3 chooses ranks and assigns nothing" in notebook.fail("%mesh push lr=0.3")


def test_a_crash_in_native_code_takes_six_lines(empty_notebook) -> None:
    notebook = empty_notebook
    notebook.run("%mesh spawn gpus=2 --no-torch --name short")
    try:
        ran = notebook.try_to_run("%%mesh\nimport ctypes\nif rank == 1: ctypes.string_at(0)")
        number = notebook.shell.execution_count - 1
        report, innermost, own = ran.stderr.splitlines()
        assert report == "[1] Fatal Python error: Segmentation fault" and innermost.endswith(" in string_at")
        assert own == f'[1]   File "<cell {number}>", line 3 in <module>'
        ended, lost, steps = ran.stdout.splitlines()
        assert re.fullmatch(r"rank 1 on \S+ ended: killed by SIGSEGV, a crash in native code", ended)
        assert lost == f"WorkerLost: {ended}; rank 0 finished; results in _mesh"
        assert steps.startswith("  rank 0 keeps its state    repair: %mesh heal")
        assert "run_code" in notebook.run("%mesh logs rank=1 -n 99").stdout
    finally:
        notebook.run("%mesh stop short")


# ---- interrupt and timeout -----------------------------------------------------------------------------------------


def test_an_interrupt_stops_all_ranks_and_keeps_their_variables(notebook, tmp_path: Path) -> None:
    notebook.run("%%mesh\nkept = rank")
    code = f"import time, pathlib\npathlib.Path('{tmp_path}', str(rank)).touch()\ntime.sleep(20)"
    thread = interrupt_when(lambda: len(os.listdir(tmp_path)) == 4)
    began = time.monotonic()
    ran = notebook.try_to_run(f"%%mesh\n{code}")
    thread.join()
    assert isinstance(ran.error, errors.CallInterrupted)
    number = notebook.shell.execution_count - 1
    kept = "CallInterrupted: interrupted: ranks 0-3 stopped, all variables kept"
    assert ran.stdout == f"{kept}; at cell {number}, line 4\n"
    assert ran.error.obeyed == (0, 1, 2, 3) and ran.error.stuck == {}
    assert time.monotonic() - began < 10
    notebook.run("%%mesh\nkept")
    assert notebook["_mesh"].values() == [0, 1, 2, 3]


def test_a_script_that_fails_on_one_rank_frees_the_others(notebook, tmp_path: Path) -> None:
    (script := tmp_path / "train.py").write_text(
        "import torch.distributed as dist, torch\nif dist.get_rank() == 1: raise ValueError('bad shard')\n"
        "dist.all_reduce(torch.ones(1))\n"
    )
    ran = notebook.try_to_run(f"%%mesh\n%run {script}\nwent_on = True")
    assert isinstance(ran.error, errors.CallFailed) and "rank 1 raised ValueError: bad shard" in str(ran.error)
    assert notebook.run("%%mesh\n'went_on' in globals()") and notebook["_mesh"].values() == [False] * 4


def test_torchruns_variables_are_there_again_in_the_next_cell(notebook) -> None:
    notebook.run("%%mesh\nimport os\ndel os.environ['WORLD_SIZE']; os.environ['MASTER_PORT'] = '1'")
    notebook.run("%%mesh\nos.environ['WORLD_SIZE'], os.environ['MASTER_PORT']")
    assert notebook["_mesh"].values() == [("4", "1")] * 4


@pytest.mark.parametrize("made", [RunningCell, CellPrompt], ids=lambda made: made.__name__)
def test_an_interrupt_just_after_the_sending_stops_the_ranks(
    notebook, monkeypatch: pytest.MonkeyPatch, made: Any
) -> None:
    """Pressed where the cell is on its way and the wait for it has not begun."""
    make = made.__init__

    def make_and_press(self: object, *args: object) -> None:
        make(self, *args)
        signal.raise_signal(signal.SIGINT)

    monkeypatch.setattr(made, "__init__", make_and_press)
    began = time.monotonic()
    ran = notebook.try_to_run("%%mesh\nimport time\ntime.sleep(50)")
    assert isinstance(ran.error, errors.CallInterrupted), ran.error
    assert time.monotonic() - began < 30
    monkeypatch.undo()
    notebook.run("%%mesh\nrank")
    assert notebook["_mesh"].values() == [0, 1, 2, 3]


def test_a_cell_that_takes_too_long_is_interrupted(notebook) -> None:
    ran = notebook.try_to_run("%%mesh --timeout 0.005m\nimport time\nif rank > 1: time.sleep(20)\nrank")
    assert isinstance(ran.error, CellTimeout) and isinstance(ran.error, errors.CallTimeout)
    assert "took more than 0.3 s on ranks 2,3; interrupted: ranks 2,3 stopped, all variables kept" in ran.stdout
    assert re.search(r"all variables kept; at cell \d+, line 3\n", ran.stdout)
    assert notebook["_mesh"].values() == [0, 1]


# ---- jobs ----------------------------------------------------------------------------------------------------------


def test_a_job_runs_beside_the_notebook_and_is_waited_for(notebook, tmp_path: Path) -> None:
    gate = tmp_path / "gate"
    code = f"import time, pathlib\nwhile not pathlib.Path('{gate}').exists(): time.sleep(0.01)\nrank"
    text = notebook.run(f"%%mesh --async --out late\n{code}").stdout
    number = text.split()[1]
    assert text == f"job {number} runs on ranks 0-3; wait for it: %mesh wait {number}\n"
    assert f"job {number}: running" in notebook.run("%mesh jobs").stdout
    assert f"wait on: %mesh wait {number}" in notebook.run(f"%mesh wait {number} --timeout 0.05").stdout
    gate.touch()
    assert f"job {number} done after" in notebook.run(f"%mesh wait {number}").stdout
    assert notebook["late"].values() == [0, 1, 2, 3]
    assert notebook.run("%mesh wait").stdout == "no job is running\n"


def test_waiting_for_a_job_that_failed_fails(notebook) -> None:
    said = notebook.run("%%mesh --async\nraise ValueError('bad')").stdout  # in which the failure may come first
    number = re.findall(r"^job (\d+) runs on", said, re.MULTILINE)[0]
    text = notebook.fail(f"%mesh wait {number}")
    assert "CallFailed: ranks 0-3 raised ValueError: bad (cell " in text
    assert f"job {number}: failed" in notebook.run("%mesh jobs").stdout


def test_a_wait_for_all_does_not_miss_a_job_that_failed_before_it(notebook) -> None:
    notebook.run("%%mesh --async\nraise ValueError('early')")
    wait_until(lambda: states_of_jobs(notebook)[-1] == "failed")
    assert "ranks 0-3 raised ValueError: early" in notebook.fail("%mesh wait")
    assert notebook.run("%mesh wait").stdout == "no job is running\n"


def test_a_job_can_be_cancelled(notebook) -> None:
    number = notebook.run("%%mesh --async\nimport time\ntime.sleep(20)").stdout.split()[1]
    wait_until(lambda: notebook.run("%mesh status").stdout.count(" busy ") == 4)
    text = notebook.run(f"%mesh cancel {number}").stdout
    assert text == f"job {number} interrupted: ranks 0-3 stopped, all variables kept\n"
    assert f"job {number}: cancelled" in notebook.run("%mesh jobs").stdout
    assert "has ended: cancelled" in notebook.run(f"%mesh cancel {number}").stdout


def states_of_jobs(notebook) -> list[str]:
    return [line.split()[2].rstrip(",") for line in notebook.run("%mesh jobs").stdout.splitlines()]


def test_interrupt_reaches_every_job(notebook) -> None:
    for _ in range(2):
        notebook.run("%%mesh --async\nimport time\ntime.sleep(20)")
    wait_until(lambda: notebook.run("%mesh status").stdout.count(" busy ") == 4)
    assert notebook.run("%mesh interrupt").stdout == "interrupted: ranks 0-3 stopped, all variables kept\n"
    assert states_of_jobs(notebook)[-2:] == ["cancelled"] * 2
    assert notebook.run("%mesh wait").stdout == "no job is running\n"
    assert notebook.run("%mesh interrupt").stdout == "nothing runs on the ranks\n"


def test_a_job_may_have_a_deadline(notebook) -> None:
    number = notebook.run("%%mesh --async --timeout 0.2\nimport time\ntime.sleep(20)").stdout.split()[1]
    assert "CallInterrupted" in notebook.fail(f"%mesh wait {number} --timeout 30")


def test_an_interrupt_while_waiting_leaves_the_job_alone(notebook) -> None:
    number = notebook.run("%%mesh --async\nimport time\ntime.sleep(20)").stdout.split()[1]
    thread = interrupt_when(lambda: True, 0.3)
    text = notebook.fail(f"%mesh wait {number}")
    thread.join()
    assert text == f"KeyboardInterrupt: job {number} runs on; end it: %mesh cancel {number}\n"
    assert f"job {number}: running" in notebook.run("%mesh jobs").stdout
    notebook.run(f"%mesh cancel {number}")


@pytest.mark.parametrize(
    ("line", "message"), [("wait 99", 'there is no job "99"; jobs: '), ("cancel x", "there is no job")]
)
def test_an_unknown_job_is_answered_with_those_that_there_are(notebook, line: str, message: str) -> None:
    assert message in notebook.fail(f"%mesh {line}")


def test_a_time_limit_of_the_notebook_ends_a_cell_that_waits(notebook) -> None:
    """The signal stands for SIGALRM, which pytest has for itself."""

    def expire(*_: object) -> None:
        raise TimeoutError("the limit")

    before = signal.signal(signal.SIGUSR2, expire)
    timer = threading.Timer(1, os.kill, (os.getpid(), signal.SIGUSR2))
    timer.start()
    try:
        ran = notebook.try_to_run("%%mesh rank=0\nt = torch.ones(1); dist.all_reduce(t)")
    finally:
        timer.join()
        signal.signal(signal.SIGUSR2, before)
    assert isinstance(ran.error, TimeoutError) and str(ran.error) == "the limit"
    assert notebook.run("%%mesh\nt = torch.ones(1); dist.all_reduce(t); t.item()").plain.strip() == "[0-3] 4.0"
