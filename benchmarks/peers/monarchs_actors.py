"""The answers of the packages that have Monarch's names: the same program, whichever is imported."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Any

from benchmarks.actor_program import Array, program


class MonarchsActors:
    """api: ``monarch.actor``, or what stands for it. options: of ``spawn_procs``.

    two_hosts: makes a mesh of processes on each of two hosts, for a block.
    """

    def __init__(
        self, api: Any, two_hosts: Callable[[], AbstractContextManager[tuple[Any, Any]]], **options: Any
    ) -> None:
        self._api = api
        self._two_hosts = two_hosts
        self._options = options
        self._program = program(api)

    def open(self) -> None:
        self._host = self._api.this_host()

    def spawn(self, ranks: int, *, torch: bool = False) -> None:
        self._procs = self._host.spawn_procs(per_host={"gpus": ranks}, **self._options)
        self._targets = self._procs.spawn("targets", self._program.target)
        self._first = self._targets.slice(gpus=0)
        (self._targets.import_torch if torch else self._targets.no_op).call().get()

    def call_one(self) -> object:
        return self._first.no_op.call_one().get()

    def call_all(self) -> object:
        return self._targets.no_op.call().get()

    def stream(self) -> object:
        return [part.get() for part in self._targets.no_op.stream()]

    def pipelined(self, count: int) -> object:
        return [future.get() for future in [self._first.no_op.call_one() for _ in range(count)]]

    def between(self, count: int) -> list[float]:
        caller = self._procs.slice(gpus=1).spawn("caller", self._program.caller)
        times: list[float] = caller.round_trips.call_one(self._first, count).get()
        return times

    def between_hosts(self, count: int) -> list[float]:
        with self._two_hosts() as (here, there):
            caller = here.spawn("caller", self._program.caller)
            target = there.spawn("target", self._program.target)
            times: list[float] = _only(caller).round_trips.call_one(_only(target), count).get()
            return times

    def hold_one(self, payload: Array) -> object:
        return self._first.hold.call_one(payload).get()

    def hold(self, payload: Array) -> object:
        return self._targets.hold.call(payload).get()

    def held(self) -> list[tuple[int, int]]:
        return list(map(tuple, _values(self._targets.held)))

    def collect(self) -> Sequence[Array]:
        return _values(self._targets.collect)

    def fail(self, busy_s: float) -> object:
        return self._targets.work.call(busy_s).get()

    def settle(self) -> object:
        return self.call_all()

    def pids(self) -> list[int]:
        return _values(self._targets.pid)

    def stop(self) -> None:
        stopped = self._procs.stop()
        if stopped is not None:
            stopped.get()

    def close(self) -> None:
        self.stop()


def _values(endpoint: Any) -> list[Any]:
    return [value for _, value in endpoint.call().get().items()]


def _only(actors: Any) -> Any:
    """Return the one actor of a mesh of one."""
    return actors.slice(**dict.fromkeys(actors.sizes, 0))
