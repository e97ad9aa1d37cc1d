"""Ray: one actor per process; payloads by `ray.put`, which every actor maps; errors by `ray.wait`."""

# mypy: disable-error-code="import-not-found, attr-defined"

from __future__ import annotations

import os
import time
from collections.abc import Sequence

import numpy as np
import ray

from benchmarks.peers.questions import COLLECTED_BYTES, Array, Holder, main


@ray.remote(num_cpus=1)
class Rank(Holder):
    """One per process."""

    def __init__(self, rank: int) -> None:
        import torch  # noqa: F401

        super().__init__()
        self.rank, self.made = rank, np.zeros(0, np.uint8)

    def collect(self) -> Array:
        """Return the array that we made."""
        if not len(self.made):
            self.made = np.full(COLLECTED_BYTES, self.rank, np.uint8)
        return self.made

    def work(self, busy_s: float) -> None:
        """Raise on rank 3, sleep on the others."""
        if self.rank == 3:
            raise ValueError("shard 3 is bad")
        time.sleep(busy_s)


class RayActors:
    """Eight actors on a cluster of this machine."""

    def open(self) -> None:
        ray.init(num_cpus=8, include_dashboard=False, log_to_driver=False, _temp_dir=os.environ["TMPDIR"] + "/ray")

    def spawn(self, ranks: int) -> None:
        self._ranks = [Rank.remote(rank) for rank in range(ranks)]
        self.call_all()

    def call_one(self) -> object:
        return ray.get(self._ranks[0].no_op.remote())

    def call_all(self) -> object:
        return ray.get([rank.no_op.remote() for rank in self._ranks])

    def pipelined(self, count: int) -> object:
        return ray.get([self._ranks[0].no_op.remote() for _ in range(count)])

    def hold(self, payload: Array) -> object:
        reference = ray.put(payload)
        return ray.get([rank.hold.remote(reference) for rank in self._ranks])

    def held(self) -> list[tuple[int, int]]:
        return ray.get([rank.held.remote() for rank in self._ranks])  # type: ignore[no-any-return]

    def collect(self) -> Sequence[Array]:
        return ray.get([rank.collect.remote() for rank in self._ranks])  # type: ignore[no-any-return]

    def fail(self, busy_s: float) -> object:
        done, self._busy = ray.wait([rank.work.remote(busy_s) for rank in self._ranks])
        return ray.get(done)

    def settle(self) -> object:
        return ray.get(self._busy)

    def pids(self) -> list[int]:
        return ray.get([rank.pid.remote() for rank in self._ranks])  # type: ignore[no-any-return]

    def stop(self) -> None:
        pids = self.pids()
        for rank in self._ranks:
            ray.kill(rank)
        while any(_alive(pid) for pid in pids):
            time.sleep(0.005)

    def close(self) -> None:
        ray.shutdown()


def _alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


if __name__ == "__main__":
    main(RayActors())
