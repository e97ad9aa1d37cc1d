"""dask.distributed: an actor per worker for calls, `scatter` for payloads, futures for work."""

# mypy: disable-error-code="import-not-found"

from __future__ import annotations

import os
import time
from collections.abc import Sequence

import numpy as np
from distributed import Client, LocalCluster, as_completed

from benchmarks.peers.questions import COLLECTED_BYTES, Array, main


class Rank:
    """One actor per worker."""

    def __init__(self, rank: int) -> None:
        import torch  # noqa: F401

        self.rank = rank
        self.made = np.zeros(0, np.uint8)

    def no_op(self) -> None:
        """Do nothing."""

    def pid(self) -> int:
        """Return our process."""
        return os.getpid()

    def collect(self) -> Array:
        """Return the array that we made."""
        if not len(self.made):
            self.made = np.full(COLLECTED_BYTES, self.rank, np.uint8)
        return self.made


def _held(payload: Array) -> tuple[int, int]:
    return len(payload), int(payload[0])


def _work(rank: int, busy_s: float) -> None:
    if rank == 3:
        raise ValueError("shard 3 is bad")
    time.sleep(busy_s)


class Workers:
    """Workers of a cluster on this machine."""

    def open(self) -> None:
        self._cluster = LocalCluster(
            n_workers=0, threads_per_worker=1, processes=True, dashboard_address=None, silence_logs=50
        )
        self._client = Client(self._cluster)

    def spawn(self, ranks: int) -> None:
        self._cluster.scale(ranks)
        self._client.wait_for_workers(ranks)
        self._addresses = list(self._client.scheduler_info(n_workers=-1)["workers"])
        self._ranks = [
            self._client.submit(Rank, rank, workers=[address], actor=True, pure=False)
            for rank, address in enumerate(self._addresses)
        ]
        self._actors = [future.result() for future in self._ranks]
        self.call_all()

    def call_one(self) -> object:
        return self._actors[0].no_op().result()

    def call_all(self) -> object:
        return [pending.result() for pending in [actor.no_op() for actor in self._actors]]

    def pipelined(self, count: int) -> object:
        return [pending.result() for pending in [self._actors[0].no_op() for _ in range(count)]]

    def hold(self, payload: Array) -> object:
        self._payload = self._client.scatter(payload, broadcast=True, hash=False)
        return self._payload

    def held(self) -> list[tuple[int, int]]:
        answers = [
            self._client.submit(_held, self._payload, workers=[address], pure=False) for address in self._addresses
        ]
        return [answer.result() for answer in answers]

    def collect(self) -> Sequence[Array]:
        return [pending.result() for pending in [actor.collect() for actor in self._actors]]

    def fail(self, busy_s: float) -> object:
        self._busy = [
            self._client.submit(_work, rank, busy_s, workers=[address], pure=False)
            for rank, address in enumerate(self._addresses)
        ]
        return next(iter(as_completed(self._busy))).result()

    def settle(self) -> object:
        return [future.exception() for future in self._busy]

    def pids(self) -> list[int]:
        return [pending.result() for pending in [actor.pid() for actor in self._actors]]

    def stop(self) -> None:
        self._actors, self._ranks = [], []
        self._cluster.scale(0)
        while self._client.scheduler_info()["workers"] or self._cluster.workers:
            time.sleep(0.005)

    def close(self) -> None:
        self._client.close()
        self._cluster.close()


if __name__ == "__main__":
    main(Workers())
