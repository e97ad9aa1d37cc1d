"""What engines say of a person's jobs, in the words of their own commands: for lists of what runs, and costs."""

from __future__ import annotations

import getpass
import os
import re
import shutil
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from subprocess import CompletedProcess

from meshbook.errors import SpawnError
from meshbook.launchers.engines.commands import answer_of, describe_failure

DEADLINE_S = 6.0
"""How long a command may take; all are run at once."""

_OURS = re.compile(r"meshbook|parsl|\bbatch-\d")
"""Names of jobs of ours; Parsl names those of batch schedulers."""
_NOBODY_TO_ASK = "Could not establish a configuration source"
"""Commands of Slurm say so where they belong to no cluster."""


def job_lists(deadline_s: float = DEADLINE_S) -> Iterator[str]:
    """Give the head and our lines of what each engine here lists; an engine that does not answer is named."""
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
    here = {engine: command for engine, command in commands.items() if shutil.which(command[0])}
    pool = ThreadPoolExecutor(max(1, len(here)))
    asked: dict[str, Future[CompletedProcess[str]]] = {
        engine: pool.submit(answer_of, engine, *command, timeout_s=deadline_s) for engine, command in here.items()
    }
    pool.shutdown(wait=False)
    for engine, answer in asked.items():
        try:
            told = answer.result()
        except SpawnError as error:
            yield f"{engine} has not told its jobs: {error}"
            continue
        head, *lines = told.stdout.splitlines() or [""]
        if told.returncode and _NOBODY_TO_ASK not in told.stderr:
            yield f"{engine} has not told its jobs: {describe_failure(told)}"
        elif ours := [line for line in lines if _OURS.search(line)]:
            yield from (head, *ours)
