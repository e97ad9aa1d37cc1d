"""Processes say what they are; one that was recorded ends with all that it has started, and no other one ends."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator

import psutil
import pytest
from patience import wait_until

from meshbook.system.exits import end_process
from meshbook.system.processes import start_time

STARTER = "trap '' TERM; setsid sh -c 'sleep 600 & sleep 600' & while :; do sleep 600 & wait $!; done"
"""A process with some below it, in a session of their own too, that starts another when one has ended."""


TITLED = """
import sys
from meshbook.system.processes import set_title
for title in sys.stdin:
    set_title(title.strip())
    print(flush=True)
"""


def test_a_title_takes_the_place_of_the_arguments() -> None:
    environment = {**os.environ, "JPY_SESSION_NAME": "/home/ada/day.ipynb"}
    command = [sys.executable, "-c", TITLED]
    with subprocess.Popen(command, env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as titled:
        assert titled.stdin is not None and titled.stdout is not None
        for role, shown in (
            ("main rank 3", "meshbook main rank 3 day.ipynb"),
            ("agent", "meshbook agent day.ipynb"),
            ("y" * 1000, f"meshbook {'y' * 1000} day.ipynb"[: len("\0".join(command)) - 1]),
        ):
            print(role, file=titled.stdin, flush=True)
            titled.stdout.readline()
            assert " ".join(psutil.Process(titled.pid).cmdline()) == shown
            assert (
                subprocess.check_output(["ps", "-ww", "-o", "args=", "-p", str(titled.pid)], text=True).strip() == shown
            )
        titled.stdin.close()


@pytest.fixture
def starter() -> Iterator[subprocess.Popen[bytes]]:
    with subprocess.Popen(["sh", "-c", STARTER]) as process:
        yield process
        process.kill()


def below(pid: int) -> list[psutil.Process]:
    return psutil.Process(pid).children(recursive=True)


def test_a_process_is_killed_with_all_below_it(starter: subprocess.Popen[bytes]) -> None:
    wait_until(lambda: len(below(starter.pid)) == 4)
    tree = below(starter.pid)
    end_process(starter.pid, start_time(starter.pid) or 0, 0.0, below=True)
    assert starter.wait(10) == -9 and psutil.wait_procs(tree, timeout=10)[1] == []


def test_another_process_of_that_number_is_let_be(starter: subprocess.Popen[bytes]) -> None:
    wait_until(lambda: len(below(starter.pid)) == 4)
    tree = below(starter.pid)
    end_process(starter.pid, (start_time(starter.pid) or 0) + 1, 0.0, below=True)
    assert starter.poll() is None and all(process.is_running() for process in tree)
    end_process(starter.pid, start_time(starter.pid) or 0, 0.0, below=True)
    psutil.wait_procs(tree, timeout=10)
