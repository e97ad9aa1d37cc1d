"""Ray: one actor per process, an async one that calls another; payloads by `ray.put`, which every actor maps.

Errors and streams by `ray.wait`.
"""

# mypy: disable-error-code="import-not-found, attr-defined"

from __future__ import annotations

import os
import time
from collections.abc import Sequence
from typing import Any

import ray
from ray.cluster_utils import Cluster

from benchmarks.actor_program import Array, Work, round_trips
from benchmarks.peers.questions import main

Target = ray.remote(num_cpus=1)(Work)


@ray.remote(num_cpus=0)
class Caller:
    """Calls another actor."""

    async def round_trips(self, target: Any, count: int) -> list[float]:
        return await round_trips(target.no_op.remote, count)


class RaysActors:
    """Actors on a cluster of this machine."""

    def open(self) -> None:
        head = {"num_cpus": 8, "include_dashboard": False, "temp_dir": os.environ["TMPDIR"] + "/ray"}
        self._cluster = Cluster()
        self._cluster.add_node(**head)
        ray.init(address=self._cluster.address, log_to_driver=False)

    def spawn(self, ranks: int, *, torch: bool = False) -> None:
        self._targets = [Target.remote(rank) for rank in range(ranks)]
        self._ask("import_torch" if torch else "no_op")

    def call_one(self) -> object:
        return ray.get(self._targets[0].no_op.remote())

    def call_all(self) -> object:
        return self._ask("no_op")

    def stream(self) -> object:
        left = [target.no_op.remote() for target in self._targets]
        while left:
            done, left = ray.wait(left)
            ray.get(done)
        return None

    def pipelined(self, count: int) -> object:
        return ray.get([self._targets[0].no_op.remote() for _ in range(count)])

    def between(self, count: int) -> list[float]:
        return ray.get(Caller.remote().round_trips.remote(self._targets[0], count))  # type: ignore[no-any-return]

    def between_hosts(self, count: int) -> list[float]:
        node = self._cluster.add_node(num_cpus=1, resources={"there": 1})
        target = Target.options(resources={"there": 1}).remote()
        ray.get(target.no_op.remote())
        times: list[float] = ray.get(Caller.remote().round_trips.remote(target, count))
        self._cluster.remove_node(node)
        return times

    def hold_one(self, payload: Array) -> object:
        return ray.get(self._targets[0].hold.remote(ray.put(payload)))

    def hold(self, payload: Array) -> object:
        return self._ask("hold", ray.put(payload))

    def held(self) -> list[tuple[int, int]]:
        return self._ask("held")

    def collect(self) -> Sequence[Array]:
        return self._ask("collect")

    def fail(self, busy_s: float) -> object:
        done, self._busy = ray.wait([target.work.remote(busy_s) for target in self._targets])
        return ray.get(done)

    def settle(self) -> object:
        return ray.get(self._busy)

    def pids(self) -> list[int]:
        return self._ask("pid")

    def stop(self) -> None:
        pids = self.pids()
        for target in self._targets:
            ray.kill(target)
        while any(os.path.exists(f"/proc/{pid}") for pid in pids):
            time.sleep(0.005)

    def close(self) -> None:
        ray.shutdown()
        self._cluster.shutdown()

    def _ask(self, method: str, *arguments: object) -> list[Any]:
        return ray.get([getattr(target, method).remote(*arguments) for target in self._targets])  # type: ignore[no-any-return]


if __name__ == "__main__":
    actors = RaysActors()
    main(actors, actors)
