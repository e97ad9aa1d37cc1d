"""meshbook: the program of `monarchs_actors`, with another import; hosts are agents, over TCP on loopback."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import meshbook.monarch
from benchmarks.peers.actor_questions import main
from benchmarks.peers.monarchs_actors import MonarchsActors
from meshbook import LocalLauncher, ProcMesh, start_hosts


@contextmanager
def two_hosts() -> Iterator[tuple[ProcMesh, ProcMesh]]:
    """Processes of two agents."""
    hosts = start_hosts({"hosts": 2}, LocalLauncher(separate_hosts=True))
    try:
        procs = hosts.spawn_procs({"gpus": 1}, name="apart", device="cpu")
        yield procs.slice(hosts=0), procs.slice(hosts=1)
    finally:
        hosts.shutdown()


if __name__ == "__main__":
    main(MonarchsActors(meshbook.monarch, two_hosts, name="bench", device="cpu"))
