"""Values are written to as soon as they have been sent, by every road between hosts: each arrives as it was."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt

from benchmarks.faults.findings import Findings
from meshbook import LocalLauncher, ProcMesh, start_hosts
from meshbook.actor import Actor, endpoint
from meshbook.concurrency.future import Future

DEADLINE_S = 120.0
LARGEST_BYTES = 24 << 20
SPOILT = 255

Array = npt.NDArray[np.uint8]


def values_in(array: Array) -> list[int]:
    """Those that occur."""
    return [int(value) for value in np.unique(array)]


class Witness(Actor):
    @endpoint
    def see(self, array: Array) -> list[int]:
        """What came."""
        return values_in(array)

    @endpoint
    def pass_on(self, value: int, size: int, others: Witness) -> list[int]:
        """Send an array on, and write to it at once."""
        array = np.full(size, value, np.uint8)
        asked = others.see.call(array)
        array[:] = SPOILT
        return sorted({seen for values in asked.get(DEADLINE_S).values() for seen in values})

    @endpoint
    def make(self, value: int, size: int) -> Array:
        """A result that is written to afterwards."""
        self.made = np.full(size, value, np.uint8)
        return self.made

    @endpoint
    def spoil(self) -> None:
        """Write to it."""
        self.made[:] = SPOILT


class _Roads:
    """The ways on which values travel; each gives a future, and what to make of its result."""

    def __init__(self, mesh: ProcMesh, witnesses: Any) -> None:
        self._mesh, self._witnesses = mesh, witnesses

    def push(self, array: Array) -> tuple[Future[Any], Callable[[Any], list[int]]]:
        pushed = self._mesh.push({"x": array})
        return pushed, lambda _: _flat(self._mesh.run("[int(v) for v in __import__('numpy').unique(x)]"))

    def scatter(self, array: Array) -> tuple[Future[Any], Callable[[Any], list[int]]]:
        scattered = self._mesh.scatter("y", [array, array], axis="hosts")
        return scattered, lambda _: _flat(self._mesh.run("[int(v) for v in __import__('numpy').unique(y[0])]"))

    def execute(self, array: Array) -> tuple[Future[Any], Callable[[Any], list[int]]]:
        return self._mesh.execute(values_in, array), _seen

    def actors(self, array: Array) -> tuple[Future[Any], Callable[[Any], list[int]]]:
        return self._witnesses.see.call(array), _seen

    def between_actors(self, array: Array) -> tuple[Future[Any], Callable[[Any], list[int]]]:
        sender, others = self._witnesses.slice(hosts=0), self._witnesses.slice(hosts=1)
        return sender.pass_on.call_one(int(array[0]), len(array), others), lambda seen: seen

    def result(self, array: Array) -> tuple[Future[Any], Callable[[Any], list[int]]]:
        actor = self._witnesses.slice(hosts=1)
        made = actor.make.call_one(int(array[0]), len(array))
        actor.spoil.call_one().get(DEADLINE_S)
        return made, values_in

    def all(self) -> list[Callable[[Array], tuple[Future[Any], Callable[[Any], list[int]]]]]:
        return [self.push, self.scatter, self.execute, self.actors, self.between_actors, self.result]


def _seen(values: Any) -> list[int]:
    return sorted({value for each in values.values() for value in each})


def _flat(asked: Future[Any]) -> list[int]:
    return _seen(asked.get(DEADLINE_S))


def run_mutation(seed: int, count: int) -> Findings:
    """``count`` values on all roads in turn, to two hosts that share no memory."""
    findings = Findings("mutation", f"{count} values written to when they were sent, seed {seed}")
    draw, hosts = random.Random(seed), start_hosts({"hosts": 2}, LocalLauncher(separate_hosts=True))
    mesh = hosts.spawn_procs({"gpus": 1}, name="far", device="cpu", group=False, owns_hosts=True)
    with findings.running(), mesh:
        witnesses: Any = mesh.spawn("witnesses", Witness)
        routers = _Roads(mesh, witnesses).all()
        for number in range(count):
            router, value = routers[number % len(routers)], draw.randrange(SPOILT)
            array = np.full(draw.randrange(1, LARGEST_BYTES), value, np.uint8)
            sent, look = router(array)
            array[:] = SPOILT
            findings.count(router.__name__)
            with findings.judging(f"{router.__name__} {number}"):
                if (seen := look(sent.get(DEADLINE_S))) != [value]:
                    findings.wrong.append(f"{router.__name__} {number}: {seen} for [{value}]")
        if held := len(mesh._controller._dispatcher.payloads._pool.in_use):
            findings.notes.append(f"{held} payloads still in use at the end")
    return findings
