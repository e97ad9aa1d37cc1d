"""Commands of engines that answer and end, and the lists of a person's jobs that they give."""

from __future__ import annotations

import getpass
import os
import re
import shutil
import subprocess
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from meshbook.errors import SpawnError
from meshbook.system.processes import kill_session

LISTED_S = 6.0
"""The time that a command which lists jobs may take; all are run at once."""

_OURS = re.compile(r"meshbook|parsl|\bbatch-\d")
"""Names of jobs of ours; Parsl names those of batch schedulers."""
NO_CLUSTER = "Could not establish a configuration source"
"""Commands of Slurm say so where they belong to no cluster."""


def program_of(engine: str, name: str) -> str:
    """Return the path of a command. Raises: SpawnError."""
    if (path := shutil.which(name)) is None:
        raise SpawnError(
            f"there is no {name} on this machine; {engine} is used from a login node of the cluster or a node"
        )
    return path


def answer_of(engine: str, *command: str, timeout_s: float) -> subprocess.CompletedProcess[str]:
    """Run a command; returns its output, at any exit code. Bytes that are no text become question marks.

    Raises: SpawnError where it is not there, or does not end; then it is killed, with all that it has started.
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
    """Return ``qstat failed: cannot connect to server``: the command's own complaint, or its exit code."""
    lines = [line.strip() for line in (answer.stderr or answer.stdout).splitlines() if line.strip()]
    return f"{answer.args[0]} failed: {'; '.join(lines)[:300] or f'exit code {answer.returncode}'}"


def job_lists(deadline_s: float = LISTED_S) -> Iterator[str]:
    """Give the head and our lines of each engine's list; an engine that does not answer is named."""
    user = getpass.getuser()
    commands = {
        "Slurm": ("squeue", "-u", user),
        "PBS, Torque or Grid Engine": ("qstat", "-u", user),
        "LSF": ("bjobs", "-w"),
        "HTCondor": ("condor_q", "-nobatch"),
        "Kubernetes": ("kubectl", "get", "jobs"),
    }
    config = Path(os.environ.get("KUBECONFIG", "").split(":")[0] or "~/.kube/config").expanduser()
    if not config.exists():
        del commands["Kubernetes"]
    here = [(engine, command) for engine, command in commands.items() if shutil.which(command[0])]
    pool = ThreadPoolExecutor(max(1, len(here)))
    lists = pool.map(lambda each: _list_of(each[0], each[1], deadline_s), here)
    pool.shutdown(wait=False)  # an interrupt waits for nothing
    for lines in lists:
        yield from lines


def _list_of(engine: str, command: Sequence[str], deadline_s: float) -> list[str]:
    """Return the head and our lines of an engine's list, or why there is none."""
    try:
        told = answer_of(engine, *command, timeout_s=deadline_s)
    except SpawnError as error:
        return [f"{engine} has not told its jobs: {error}"]
    if told.returncode and NO_CLUSTER not in told.stderr:
        return [f"{engine} has not told its jobs: {describe_failure(told)}"]
    head, *lines = told.stdout.splitlines() or [""]
    ours = [line for line in lines if _OURS.search(line)]
    return [head, *ours] if ours else []
