"""Ray: one actor per process, an async one that calls another; payloads by `ray.put`; a stream by `ray.wait`."""

# mypy: disable-error-code="import-not-found, attr-defined"

from __future__ import annotations

import os
import time
from typing import Any

import ray
from ray.cluster_utils import Cluster

from benchmarks.actor_program import WARM_UP
from benchmarks.peers.actor_questions import main
from benchmarks.peers.questions import Array, Holder

Target = ray.remote(num_cpus=1)(Holder)


@ray.remote(num_cpus=0)
class Caller:
    """Calls another actor."""

    async def round_trips(self, target: Any, count: int) -> list[float]:
        """Seconds of each call."""
        times = []
        for index in range(count + WARM_UP):
            started = time.perf_counter()
            await target.no_op.remote()
            if index >= WARM_UP:
                times.append(time.perf_counter() - started)
        return times


class RaysActors:
    """Actors on a cluster of this machine."""

    def open(self) -> None:
        head = {"num_cpus": 8, "include_dashboard": False, "temp_dir": os.environ["TMPDIR"] + "/ray"}
        self._cluster = Cluster(initialize_head=True, head_node_args=head)
        ray.init(address=self._cluster.address, log_to_driver=False)

    def spawn(self, ranks: int) -> None:
        self._targets = [Target.remote() for _ in range(ranks)]
        self.call_all()
        self._caller = Caller.remote()

    def call_one(self) -> object:
        return ray.get(self._targets[0].no_op.remote())

    def call_all(self) -> object:
        return ray.get([target.no_op.remote() for target in self._targets])

    def stream(self) -> object:
        left = [target.no_op.remote() for target in self._targets]
        while left:
            done, left = ray.wait(left)
            ray.get(done)
        return None

    def pipelined(self, count: int) -> object:
        return ray.get([self._targets[0].no_op.remote() for _ in range(count)])

    def between(self, count: int) -> list[float]:
        return ray.get(self._caller.round_trips.remote(self._targets[0], count))  # type: ignore[no-any-return]

    def between_hosts(self, count: int) -> list[float]:
        node = self._cluster.add_node(num_cpus=1, resources={"there": 1})
        target = Target.options(resources={"there": 1}).remote()
        ray.get(target.no_op.remote())
        times: list[float] = ray.get(self._caller.round_trips.remote(target, count))
        self._cluster.remove_node(node)
        return times

    def hold_one(self, payload: Array) -> object:
        return ray.get(self._targets[0].hold.remote(ray.put(payload)))

    def hold(self, payload: Array) -> object:
        reference = ray.put(payload)
        return ray.get([target.hold.remote(reference) for target in self._targets])

    def held(self) -> list[tuple[int, int]]:
        return ray.get([target.held.remote() for target in self._targets])  # type: ignore[no-any-return]

    def close(self) -> None:
        ray.shutdown()
        self._cluster.shutdown()


if __name__ == "__main__":
    main(RaysActors())
