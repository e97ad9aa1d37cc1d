"""Hosts by mpirun, by sbatch and by hand, on loopback: spawn, a host that is lost."""

from __future__ import annotations

import contextlib
import io
import os
import re
import shutil
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import meshbook
from benchmarks.clusters import NAMES, in_slurm, spawn_and_lose
from benchmarks.figures import Figure, Settings
from meshbook.launchers.base import Launcher
from meshbook.launchers.batch import BatchLauncher
from meshbook.launchers.manual import ManualLauncher
from meshbook.launchers.mpi import MPILauncher

QUESTION = (
    "Two hosts with two ranks each by Open MPI's mpirun (with a stand-in of ssh), by a job of sbatch each on a real "
    "Slurm, and by two people who run the shown command at once: spawn until all have answered, process group formed; "
    "the agent of a host is killed: until its loss is known, and healed."
)
MPIRUN = "mpirun.openmpi"
_COMMAND = re.compile(r"<<< (mb1-\S+)$", re.MULTILINE)


def run(settings: Settings) -> Iterator[Figure]:
    """What is not on this machine is left out."""
    count = settings.count(5)
    if shutil.which(MPIRUN) is None or os.getuid():
        print(f"left out: mpirun; it wants {MPIRUN}, and root for names of hosts")
    else:
        os.environ.update(OMPI_ALLOW_RUN_AS_ROOT="1", OMPI_ALLOW_RUN_AS_ROOT_CONFIRM="1")
        with tempfile.TemporaryDirectory() as folder:
            yield from spawn_and_lose("engines", _by_mpirun(Path(folder)), "mpirun", count)
        meshbook.shutdown()
    sbatch = BatchLauncher("slurm", options=["--walltime", "0:30:00"])
    yield from in_slurm(lambda: [spawn_and_lose("engines", sbatch, "sbatch", count)])
    with People() as shown, contextlib.redirect_stdout(shown):
        figures = list(spawn_and_lose("engines", ManualLauncher(), "hand", count))
    meshbook.shutdown()
    yield from figures


def _by_mpirun(folder: Path) -> Launcher:
    """Its hosts are names of their own on this machine, which it reaches by a stand-in of ssh."""
    shell = folder / "shell"
    shell.write_text('#!/bin/sh\nname=$1; shift\nexec unshare --uts sh -c "hostname $name; $*"\n')
    shell.chmod(0o700)
    return MPILauncher(program=MPIRUN, options=["--mca", "plm_rsh_agent", str(shell), "--host", ",".join(NAMES)])


class People(io.StringIO):
    """What is shown goes to two people, who run each command that they see, until the block ends."""

    def __enter__(self) -> People:
        self._seen, self._ended = 0, False
        self._joined: list[subprocess.Popen[bytes]] = []
        self._thread = threading.Thread(target=self._look)
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._ended = True
        self._thread.join()
        for each in self._joined:
            each.wait(30)

    def _look(self) -> None:
        command = [sys.executable, "-m", "meshbook.join"]
        while not self._ended:
            tickets = _COMMAND.findall(self.getvalue())
            for number, ticket in enumerate(tickets[self._seen :], self._seen):
                for _ in range(2):  # who is one too many is refused
                    joined = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.DEVNULL)
                    assert joined.stdin is not None
                    joined.stdin.write(f"{ticket}\n".encode())
                    joined.stdin.close()
                    self._joined.append(joined)
                self._seen = number + 1
            time.sleep(0.01)
