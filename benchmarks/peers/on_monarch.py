"""torchmonarch: one actor per process; `call` and `call_one`, as its getting-started guide has it."""

# mypy: disable-error-code="import-not-found, misc, untyped-decorator"

from __future__ import annotations

import os
import time
from collections.abc import Sequence

import numpy as np
from monarch.actor import Actor, current_rank, endpoint, this_host

from benchmarks.peers.questions import COLLECTED_BYTES, Array, main


class Rank(Actor):
    """One per process."""

    def __init__(self) -> None:
        import torch  # noqa: F401

        self.rank = current_rank().rank
        self.payload = self.made = np.zeros(0, np.uint8)

    @endpoint
    def no_op(self) -> None:
        """Do nothing."""

    @endpoint
    def pid(self) -> int:
        """Return our process."""
        return os.getpid()

    @endpoint
    def hold(self, payload: Array) -> None:
        """Keep the payload."""
        self.payload = payload

    @endpoint
    def held(self) -> tuple[int, int]:
        """Return length and first byte of the payload."""
        return len(self.payload), int(self.payload[0])

    @endpoint
    def collect(self) -> Array:
        """Return the array that we made."""
        if not len(self.made):
            self.made = np.full(COLLECTED_BYTES, self.rank, np.uint8)
        return self.made

    @endpoint
    def work(self, busy_s: float) -> None:
        """Raise on rank 3, sleep on the others."""
        if self.rank == 3:
            raise ValueError("shard 3 is bad")
        time.sleep(busy_s)


class Monarch:
    """A proc mesh on this host."""

    def open(self) -> None:
        self._host = this_host()

    def spawn(self, ranks: int) -> None:
        self._procs = self._host.spawn_procs(per_host={"gpus": ranks})
        self._ranks = self._procs.spawn("ranks", Rank)
        self._first = self._ranks.slice(gpus=0)
        self._ranks.no_op.call().get()

    def call_one(self) -> object:
        return self._first.no_op.call_one().get()

    def call_all(self) -> object:
        return self._ranks.no_op.call().get()

    def pipelined(self, count: int) -> object:
        return [future.get() for future in [self._first.no_op.call_one() for _ in range(count)]]

    def hold(self, payload: Array) -> object:
        return self._ranks.hold.call(payload).get()

    def held(self) -> list[tuple[int, int]]:
        return [value for _, value in self._ranks.held.call().get().items()]

    def collect(self) -> Sequence[Array]:
        return [value for _, value in self._ranks.collect.call().get().items()]

    def fail(self, busy_s: float) -> object:
        return self._ranks.work.call(busy_s).get()

    def settle(self) -> object:
        return self.call_all()

    def pids(self) -> list[int]:
        return [value for _, value in self._ranks.pid.call().get().items()]

    def stop(self) -> None:
        self._procs.stop().get()

    def close(self) -> None:
        self.stop()


if __name__ == "__main__":
    main(Monarch())
