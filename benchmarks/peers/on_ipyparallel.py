"""ipyparallel: engines under a local cluster; direct views, and the broadcast view for payloads."""

# mypy: disable-error-code="import-not-found"

from __future__ import annotations

import os
import time
from collections.abc import Sequence
from typing import Any

import ipyparallel

from benchmarks.peers.questions import COLLECTED_BYTES, Array, main


def _no_op() -> None:
    pass


def _work(busy_s: float) -> None:
    import time

    if rank == 3:  # type: ignore[name-defined]  # noqa: F821
        raise ValueError("shard 3 is bad")
    time.sleep(busy_s)


class Engines:
    """Engines of a cluster on this machine."""

    def open(self) -> None:
        self._cluster = ipyparallel.Cluster(log_level=40)
        self._cluster.start_controller_sync()
        self._client = self._cluster.connect_client_sync()
        self._made = False

    def spawn(self, ranks: int) -> None:
        self._engines = self._cluster.start_engines_sync(ranks)
        while len(self._client.ids) < ranks:
            time.sleep(0.005)
        self._all = self._client[:]
        self._broadcast = self._client.broadcast_view()
        self._broadcast.is_coalescing = True
        self._first = self._client[self._client.ids[0]]
        self._all.execute("import torch, numpy", block=True)
        self._all.scatter("rank", range(ranks), flatten=True, block=True)
        self._made = False

    def call_one(self) -> object:
        return self._first.apply_sync(_no_op)

    def call_all(self) -> object:
        return self._all.apply_sync(_no_op)

    def pipelined(self, count: int) -> object:
        return [result.get() for result in [self._first.apply_async(_no_op) for _ in range(count)]]

    def hold(self, payload: Array) -> object:
        return self._broadcast.push({"payload": payload}, block=True)

    def held(self) -> list[tuple[int, int]]:
        return [tuple(value) for value in self._all.apply_sync(_held)]

    def collect(self) -> Sequence[Array]:
        if not self._made:
            self._all.execute(f"made = numpy.full({COLLECTED_BYTES}, rank, numpy.uint8)", block=True)
            self._made = True
        pulled: Any = self._all.pull("made", block=True)
        return list(pulled)

    def fail(self, busy_s: float) -> object:
        return self._all.apply_async(_work, busy_s).get()

    def settle(self) -> object:
        return self.call_all()

    def pids(self) -> list[int]:
        return list(self._all.apply_sync(os.getpid))

    def stop(self) -> None:
        self._cluster.stop_engines_sync()
        while self._client.ids:
            time.sleep(0.005)

    def close(self) -> None:
        self._client.close()
        self._cluster.stop_cluster_sync()


def _held() -> tuple[int, int]:
    return len(payload), int(payload[0])  # type: ignore[name-defined]  # noqa: F821


if __name__ == "__main__":
    main(Engines())
