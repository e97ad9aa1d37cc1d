"""The engines that start hosts: how a person asks for one, and how the next controller finds its hosts again.

An engine is a module beside this one that has two functions, and a line in `ENGINES`:

    parse(asked)          -> its Launcher, from the text behind ``--on``. Raises: UsageError
    find(id, saved, logs) -> the LaunchedHost of a former controller, and the Launcher of another one in its place
"""

from __future__ import annotations

import importlib
import importlib.util
import shutil
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import NamedTuple

from meshbook.errors import UsageError
from meshbook.formatting import did_you_mean
from meshbook.launchers.base import LaunchedHost, Launcher
from meshbook.sessions.folder import SavedHost


class Engine(NamedTuple):
    """An engine, as a person may ask for it."""

    usage: str
    """Its name behind ``--on``; the text after a colon is the engine's own."""
    counted: str = ""
    """The word for its hosts, where it is told how many there are to be."""
    has_options: bool = True
    """Whether it takes options, behind ``--``."""
    program: str = ""
    package: str = ""
    """The program on the PATH, or the Python package, by which it is spoken to."""

    @property
    def missing(self) -> str:
        """Return the program or package that this machine lacks; empty where the engine can be used from here."""
        if self.program and shutil.which(self.program) is None:
            return self.program
        return self.package if self.package and importlib.util.find_spec(self.package) is None else ""


ENGINES = {
    "local": Engine("local", has_options=False),
    "ssh": Engine("ssh:HOST,..", program="ssh"),
    "slurm": Engine("slurm", "nodes of Slurm", program="srun"),
    "k8s": Engine("k8s", "pods of Kubernetes", package="kubernetes"),
    "ray": Engine("ray[:ADDRESS]", "nodes of Ray", package="ray"),
    "mpi": Engine("mpi[:MPIRUN]", "hosts of mpirun", program="mpirun"),
    "batch": Engine("batch:SCHEDULER", "jobs, one for each host", package="parsl"),
    "manual": Engine("manual[:ADDRESS]", "hosts you will start", has_options=False),
}


class Asked(NamedTuple):
    """A person's request to an engine."""

    named: str = ""
    """The text after its name and a colon, which `parse` fills in."""
    python: str | None = None
    """The interpreter on its hosts."""
    options: tuple[str, ...] = ()
    """The arguments behind ``--``."""
    within_s: float | None = None
    device: str | None = None
    """The device of the ranks, if it was said."""
    count_ranks: Callable[[], int] = lambda: 1
    """Returns how many ranks each host is to have. Raises: UsageError."""
    torch: bool = True
    """Whether ranks have torch."""


def parse(text: str, asked: Asked) -> Launcher:
    """Return the launcher that starts the hosts. text: as behind ``--on``. Raises: UsageError."""
    name, colon, named = text.partition(":")
    if (engine := ENGINES.get(name)) is None:
        there = ", ".join(each.usage for each in ENGINES.values())
        raise UsageError(f'unknown engine "{name}".{did_you_mean(name, ENGINES)} There is: {there}.')
    if colon and ":" not in engine.usage:
        raise UsageError(f'the engine {name} has no hosts to name, but got "{named}".')
    if asked.options and not engine.has_options:
        raise UsageError(f'the engine {name} has no options, but got "{" ".join(asked.options)}" after "--".')
    module = importlib.import_module(f"meshbook.launchers.{name}")
    launcher: Launcher = module.parse(asked._replace(named=named))
    return launcher


def count_hosts(launcher: Launcher, count: int | None) -> int | None:
    """Return the number of a mesh's own hosts, of which a person asked for ``count``; None where it is on this one.

    Raises: UsageError.
    """
    named = len(launcher.named_hosts)
    if named and count not in (None, named):
        raise UsageError(f"hosts={count}, but --on names {named}; leave hosts out.")
    if count is None and (counted := ENGINES[launcher.name].counted):
        raise UsageError(f"say how many {counted}: hosts=N.")
    return named or count


def find(hosts: Mapping[str, SavedHost], logs: Path) -> Iterator[tuple[str, LaunchedHost, Launcher]]:
    """Find the hosts of a session's former controller, each with the launcher of another one in its place.

    hosts: by id. logs: the folder of the session's logs.
    """
    for id, saved in hosts.items():
        engine = importlib.import_module(f"meshbook.launchers.{saved.launcher.engine}")
        yield id, *engine.find(id, saved, logs)
