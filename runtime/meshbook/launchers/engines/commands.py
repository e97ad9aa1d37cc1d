"""Commands of engines that are asked, answer and end."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

from meshbook.errors import SpawnError
from meshbook.system.processes import kill_session


def program_of(engine: str, name: str) -> str:
    """Where a command is. Raises: SpawnError."""
    if (path := shutil.which(name)) is None:
        raise SpawnError(
            f"there is no {name} on this machine; {engine} is used from a login node of the cluster or a node"
        )
    return path


def answer_of(engine: str, *command: str, timeout_s: float) -> subprocess.CompletedProcess[str]:
    """What a command has said, whatever its exit code; what is no text stands as question marks.

    Raises: SpawnError where it is not there, or does not end; then it is killed, with what it has started.
    """
    program = program_of(engine, command[0])
    try:
        process = subprocess.Popen(
            [program, *command[1:]],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            errors="replace",
            start_new_session=True,
        )
    except OSError as error:
        raise SpawnError(f"{program} could not be run: {error.strerror}") from error
    with process:
        try:
            said, complained = process.communicate(timeout=timeout_s)
        except BaseException as error:
            kill_session(process.pid)  # else what it has started would hold the pipes, and us
            if isinstance(error, subprocess.TimeoutExpired):
                text = f"{engine} does not answer: {Path(program).name} has not ended within {timeout_s:.2g} s"
                raise SpawnError(text) from None
            raise
    return subprocess.CompletedProcess(command, process.returncode, said, complained)


def describe_failure(answer: subprocess.CompletedProcess[str]) -> str:
    """``qstat failed: cannot connect to server``: what a command says of it, or its exit code."""
    lines = [line.strip() for line in (answer.stderr or answer.stdout).splitlines() if line.strip()]
    return f"{answer.args[0]} failed: {'; '.join(lines)[:300] or f'exit code {answer.returncode}'}"
