"""From the first interrupt to the respawn of a rank that does not move, as a person in a notebook goes through it."""

from __future__ import annotations

import os
import re
import signal
import threading
import time

from patience import interrupt_when, wait_until

from meshbook import errors

HOLDS_GIL = "%%mesh\nimport ctypes, time\nx = rank\nif rank == 3: ctypes.PyDLL(None).usleep(60_000_000)\ntime.sleep(60)"


def press_when_busy(notebook) -> threading.Thread:
    """Press interrupt once all ranks of the current mesh are at it."""
    procs = notebook.shell._meshbook_session.mesh()
    return interrupt_when(lambda: not any(status.state == "idle" for status in procs.status()), 0.3)


def test_a_rank_that_never_moves_is_respawned_and_the_others_keep_their_variables(notebook) -> None:
    thread = press_when_busy(notebook)
    ran = notebook.try_to_run(HOLDS_GIL)
    thread.join()
    assert isinstance(ran.error, errors.CallInterrupted)
    assert ran.stdout == (
        "CallInterrupted: interrupted: ranks 0-2 stopped, all variables kept; "
        f"at cell {notebook.shell.execution_count - 1}, line 5\n"
        "  rank 3 did not stop: native code holds the GIL\n"
        "  insist: interrupt once more, or %mesh interrupt\n"
    )
    table = notebook.run("%mesh status").stdout
    assert re.search(r"^3 .* silent .* native code holds the GIL$", table, re.MULTILINE), table
    began = time.monotonic()
    assert notebook.fail("%mesh interrupt") == (
        "CallInterrupted: interrupted\n"
        "  rank 3 still does not stop: native code holds the GIL\n"
        "  replace: %mesh respawn rank=3    end the mesh: %mesh stop    or wait: usable again once back\n"
    )
    assert time.monotonic() - began < 2
    notebook.run("%mesh respawn rank=3")
    assert notebook.run("%mesh eval globals().get('x')").stdout.replace(" ", "") == "[0]0\n[1]1\n[2]2\n[3]None\n"
    assert notebook.run("%mesh interrupt").stdout == "nothing runs on the ranks\n"


def test_a_stopped_rank_is_continued_by_mesh_interrupt(notebook) -> None:
    procs = notebook.shell._meshbook_session.mesh()
    pid = procs.status()[2].pid
    notebook.run("%%mesh --async\nimport time\ntime.sleep(60)")
    wait_until(lambda: not any(status.state == "idle" for status in procs.status()))
    os.kill(pid, signal.SIGSTOP)
    table = notebook.run("%mesh status").stdout
    assert re.search(r"^2 .* stopped .* stopped by SIGSTOP$", table, re.MULTILINE), table
    assert "rank 2 did not stop: stopped by SIGSTOP\n  insist: interrupt once more" in notebook.fail("%mesh interrupt")
    assert notebook.run("%mesh interrupt").stdout == "interrupted: rank 2 stopped, all variables kept\n"
    assert notebook.run("%mesh eval rank").stdout.endswith("[0] 0\n[1] 1\n[2] 2\n[3] 3\n")


def test_a_rank_that_comes_back_late_is_told_of(notebook) -> None:
    thread = press_when_busy(notebook)
    ran = notebook.try_to_run(
        "%%mesh\nimport time\ntry:\n    time.sleep(60)\nfinally:\n    if rank == 1: time.sleep(2)\nprint('never')"
    )
    thread.join()
    assert "rank 1 did not stop: in time.sleep (cell " in ran.stdout
    assert "it is still cleaning up after KeyboardInterrupt" in ran.stdout
    assert notebook.run("%mesh eval rank").stdout.endswith("[0] 0\n[1] 1\n[2] 2\n[3] 3\n")
