"""meshbook: `execute`, `push`, `pull`, and the events of a cell for errors; actors as Monarch's program has them.

Hosts are agents, over TCP on loopback.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import meshbook.monarch
from benchmarks.actor_program import COLLECTED_BYTES, Array
from benchmarks.cells import WatchedCell
from benchmarks.peers.monarchs_actors import MonarchsActors
from benchmarks.peers.questions import main
from benchmarks.subject import TIMEOUT_S, no_op, pids
from meshbook import LocalLauncher, ProcMesh, start_hosts, this_host


class Meshbook:
    """A mesh on this host, with its process group formed: more than any peer's spawn does."""

    def open(self) -> None:
        self._host = this_host()
        self._spawned = 0

    def spawn(self, ranks: int, *, torch: bool = True) -> None:
        self._spawned += 1
        self._procs = self._host.spawn_procs(per_host={"gpus": ranks}, name=f"bench{self._spawned}", device="cpu")
        self._first = self._procs.slice(gpus=0)
        self._made = False
        self.call_all()

    def call_one(self) -> object:
        return no_op(self._first).get(TIMEOUT_S)

    def call_all(self) -> object:
        return no_op(self._procs).get(TIMEOUT_S)

    def pipelined(self, count: int) -> object:
        return [future.get(TIMEOUT_S) for future in [no_op(self._first) for _ in range(count)]]

    def hold(self, payload: Array) -> object:
        return self._procs.push({"payload": payload}).get(TIMEOUT_S)

    def held(self) -> list[tuple[int, int]]:
        return list(self._procs.evaluate("(len(payload), int(payload[0]))").get(TIMEOUT_S).values())

    def collect(self) -> Sequence[Array]:
        if not self._made:
            code = f"import numpy\nmade = numpy.full({COLLECTED_BYTES}, rank, numpy.uint8)"
            self._procs.run(code).get(TIMEOUT_S)
            self._made = True
        return list(self._procs.pull("made").get(TIMEOUT_S).values())

    def fail(self, busy_s: float) -> object:
        code = f"import time\nif rank == 3:\n    raise ValueError('shard 3 is bad')\ntime.sleep({busy_s})"
        self._cell = WatchedCell(self._procs, code)
        raise RuntimeError(str(self._cell.first_failure().event))

    def settle(self) -> object:
        return self._cell.wait()

    def pids(self) -> list[int]:
        return pids(self._procs)

    def stop(self) -> None:
        self._procs.stop()

    def close(self) -> None:
        self.stop()


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
    main(Meshbook(), MonarchsActors(meshbook.monarch, two_hosts, name="bench", device="cpu"))
