"""Hosts that mpirun reaches by a stand-in of ssh, each with a name of its own on this machine."""

from __future__ import annotations

import contextlib
import shutil
import subprocess
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import psutil
import pytest

_SHELL = """#!/bin/sh
[ "$1" = -x ] && shift
name=$1; shift
case $name in node*) ;; *) echo "ssh: Could not resolve hostname $name: Name or service not known" >&2; exit 255;; esac
[ -e {folder}/wait ] && {{ touch {folder}/waits; exec sleep 600; }}
exec unshare --uts sh -c "hostname $name; $*"
"""

FLAVOURS = ("openmpi", "mpich")


class MPIHosts:
    """program: an mpirun."""

    def __init__(self, flavour: str, folder: Path) -> None:
        self.program, self.folder, self._flavour = f"mpirun.{flavour}", folder, flavour
        self.shell = folder / "shell"
        self.shell.write_text(_SHELL.format(folder=folder))
        self.shell.chmod(0o700)

    def options(self, *names: str) -> tuple[str, ...]:
        """Of its mpirun, with which it finds hosts of these names."""
        listed = ",".join(names)
        if self._flavour == "openmpi":
            return "--mca", "plm_rsh_agent", str(self.shell), "--host", listed
        return "-launcher", "ssh", "-launcher-exec", str(self.shell), "-hosts", listed


def mpi_processes() -> list[psutil.Process]:
    """Our children of the name of mpirun."""
    found = []
    for child in psutil.Process().children():
        with contextlib.suppress(psutil.NoSuchProcess):  # it has ended meanwhile
            found += [child] if child.name().startswith("mpi") else []
    return found


def await_end(processes: Sequence[psutil.Process], timeout_s: float = 30.0) -> None:
    """Wait until they have ended, and no mpirun is among our children."""
    deadline = time.monotonic() + timeout_s
    while (left := [*mpi_processes(), *_running(processes)]) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not left, left


def _running(processes: Sequence[psutil.Process]) -> Iterator[psutil.Process]:
    for process in processes:
        with contextlib.suppress(psutil.NoSuchProcess):
            if process.is_running() and process.status() != psutil.STATUS_ZOMBIE:
                yield process


@contextlib.contextmanager
def mpi_hosts(flavour: str, folder: Path) -> Iterator[MPIHosts]:
    """Skipped where there is no such mpirun, or machines cannot have other names."""
    if shutil.which(f"mpirun.{flavour}") is None:
        pytest.skip(f"there is no mpirun.{flavour}: apt-get install {flavour + '-bin' * (flavour == 'openmpi')}")
    if subprocess.run(["unshare", "--uts", "true"], capture_output=True, timeout=60).returncode:
        pytest.skip("unshare --uts is not allowed, without which hosts have no names of their own")
    with pytest.MonkeyPatch.context() as patch:
        for name in ("OMPI_ALLOW_RUN_AS_ROOT", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM"):
            patch.setenv(name, "1")
        hosts = MPIHosts(flavour, folder)
        yield hosts
        await_end(())
        left = [each for each in psutil.process_iter(["cmdline"]) if str(hosts.shell) in (each.info["cmdline"] or ())]
        await_end(left)
