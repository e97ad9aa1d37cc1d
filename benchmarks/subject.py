"""The mesh under test."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from meshbook import this_host

if TYPE_CHECKING:  # who wants a mesh from nothing imports no more than a program would
    from meshbook import Future, ProcMesh, ValueMesh

TIMEOUT_S = 120.0  # deadline of every single call here: a benchmark that hangs has failed
_NUMBERS = itertools.count(1)


@contextmanager
def mesh(gpus: int, *, group: bool = True) -> Iterator[ProcMesh]:
    """A mesh of ``gpus`` ranks on this host, on the CPU; stopped on leaving."""
    name = f"bench{next(_NUMBERS)}"
    procs = this_host().spawn_procs(per_host={"gpus": gpus}, name=name, device="cpu", group=group)
    try:
        yield procs
    finally:
        procs.stop()


def no_op(procs: ProcMesh) -> Future[ValueMesh[int]]:
    """Call a function that does nothing on every rank of ``procs``."""
    return procs.execute(int)


def pids(procs: ProcMesh) -> list[int]:
    """Return the pid of every rank, in rank order."""
    return [status.pid for status in procs.status()]
