"""``!command`` and ``%%bash`` on a rank: output goes where the rank's own goes, and an interrupt ends all processes."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import tempfile
import time
from typing import IO

from meshbook.system.descriptors import open_above
from meshbook.system.processes import descendants, is_same_process, start_time

PATIENCE_S = 0.5
"""The time that an interrupted command has to obey SIGINT, and then SIGTERM."""

OURS: set[int] = set()
"""The pids of commands that run now; this module passes interrupts to them itself."""


def run_command(command: str, *, capture: bool = False) -> tuple[int, str]:
    """Run ``command`` in the user's shell, without stdin; returns (exit code, negative for a signal; captured text).

    capture: return its output, stderr included, in place of showing it.
    Raises: KeyboardInterrupt, after the command and its children have ended.
    """
    process = subprocess.Popen(
        command,
        shell=True,
        executable=os.environ.get("SHELL") or None,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE if capture else None,
        stderr=subprocess.STDOUT if capture else None,
    )
    output = _finish(process, process.stdout)
    code = process.returncode
    return 128 - code if code > 128 else code, output.decode("utf-8", "backslashreplace")


def run_script(interpreter: str, script: str) -> int:
    """Have ``interpreter`` run the text of a script; returns its exit code and raises as `run_command`."""
    with open_above(tempfile.TemporaryFile) as file:
        file.write(script.encode("utf-8", "surrogateescape"))
        file.seek(0)
        process = subprocess.Popen([interpreter], stdin=file)
    _finish(process, None)
    return process.returncode


def _finish(process: subprocess.Popen[bytes], pipe: IO[bytes] | None) -> bytes:
    """Wait for the process and read its pipe; on an interrupt end it."""
    output = b""
    OURS.add(process.pid)
    try:
        if pipe is not None:
            with pipe:
                output = pipe.read()
        _, status = os.waitpid(process.pid, 0)  # Popen.wait() would keep an interrupt back for 0.25 s
        process.returncode = os.waitstatus_to_exitcode(status)
    except KeyboardInterrupt:
        _end(process)
        raise
    finally:
        OURS.discard(process.pid)
    return output


def _end(process: subprocess.Popen[bytes]) -> None:
    """End the command and its descendants: SIGINT as Ctrl-C would, then SIGTERM, then SIGKILL."""
    tree = {pid: started for pid in descendants(process.pid) if (started := start_time(pid)) is not None}
    try:
        for signum in (signal.SIGINT, signal.SIGTERM):
            _signal(tree, signum)
            deadline = time.monotonic() + PATIENCE_S
            while _alive(tree) and time.monotonic() < deadline:
                time.sleep(0.005)
    finally:
        _signal(tree, signal.SIGKILL)
        process.wait()


def _alive(tree: dict[int, int]) -> list[int]:
    return [pid for pid, started in tree.items() if is_same_process(pid, started)]


def _signal(tree: dict[int, int], signum: signal.Signals) -> None:
    for pid in _alive(tree):
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signum)
