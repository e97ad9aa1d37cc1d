"""The engines that start hosts: how a person asks for one, and how the next controller finds its hosts again.

An engine is a module beside this one that has two functions, and a line in `ENGINES`:

    parse(asked)         -> its Launcher, of what stands behind ``--on``. Raises: UsageError
    find(hosts, logs)    -> (id, LaunchedHost, Launcher) of each host that a former controller has started
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import NamedTuple

from meshbook.launchers.base import LaunchedHost, Launcher
from meshbook.sessions.folder import SavedHost


class Engine(NamedTuple):
    """What a person may say of an engine."""

    usage: str
    """How ``--on`` names it; what follows a colon is the engine's own."""
    counted: str = ""
    """What its hosts are called, where it is told how many there are to be."""
    has_options: bool = True
    """Whether it takes what follows ``--``."""


ENGINES = {
    "local": Engine("local", has_options=False),
    "ssh": Engine("ssh:HOST,.."),
    "slurm": Engine("slurm", "nodes of Slurm"),
    "k8s": Engine("k8s", "pods of Kubernetes"),
    "ray": Engine("ray[:ADDRESS]", "nodes of Ray"),
    "mpi": Engine("mpi[:MPIRUN]", "hosts of mpirun"),
    "batch": Engine("batch:SCHEDULER", "jobs, one for each host"),
    "manual": Engine("manual[:ADDRESS]", "hosts you will start", has_options=False),
}


class Asked(NamedTuple):
    """What a person asks of an engine."""

    named: str = ""
    """What follows its name and a colon."""
    python: str | None = None
    """The interpreter on its hosts."""
    options: tuple[str, ...] = ()
    """What follows ``--``."""
    within_s: float | None = None
    device: str | None = None
    """That of the ranks, if it was said."""
    count_ranks: Callable[[], int] = lambda: 1
    """Says how many ranks each host is to have. Raises: UsageError."""
    torch: bool = True
    """Whether ranks have it."""


def parse(engine: str, asked: Asked) -> Launcher:
    """Return what starts the hosts. Raises: UsageError."""
    launcher: Launcher = importlib.import_module(f"meshbook.launchers.{engine}").parse(asked)
    return launcher


def find(hosts: Mapping[str, SavedHost], logs: Path) -> Iterator[tuple[str, LaunchedHost, Launcher]]:
    """Find the hosts of a session's former controller, each with what starts another one in its place.

    hosts: by id. logs: the folder of the session's logs.
    """
    for engine in {saved.launcher.engine for saved in hosts.values()}:
        of_engine = {id: saved for id, saved in hosts.items() if saved.launcher.engine == engine}
        yield from importlib.import_module(f"meshbook.launchers.{engine}").find(of_engine, logs)
