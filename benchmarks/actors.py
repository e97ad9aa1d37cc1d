"""What calls to actors cost: from the notebook's process, from actor to actor, and between two hosts."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from typing import Any

import numpy as np

from benchmarks.actor_program import program
from benchmarks.figures import Figure, Settings, side_by_side, timed
from benchmarks.floors import Relay
from benchmarks.stats import interleave, summarise
from benchmarks.subject import TIMEOUT_S, mesh, no_op
from meshbook import LocalLauncher, ProcMesh, monarch, start_hosts

QUESTION = (
    "Round trip of an empty endpoint: of one actor, of 8, and of 8 with answers taken as they come; beside it a call "
    "to the main thread of the same ranks, and raw sockets through one relay process. Calls per second when none waits "
    "for the one before. Round trips from actor to actor, on one host and between two agents over TCP on loopback. "
    "An argument of 1 MB and of 100 MB, changed before each call."
)
IN_FLIGHT = 1000
TARGET, CALLER = program(monarch)


def run(settings: Settings) -> Iterator[Figure]:
    """All of it in one run."""
    with ExitStack() as stack:
        here = stack.enter_context(mesh(8))
        targets: Any = here.spawn("targets", TARGET)
        yield from _calling(here, targets, settings)
        yield from _pipelined(targets, settings)
        yield from _between("one host", here.slice(gpus=[0]), targets.slice(gpus=1), settings)
        yield from _payloads(targets, settings)
        hosts = start_hosts({"hosts": 2}, LocalLauncher(separate_hosts=True))
        apart = stack.enter_context(hosts.spawn_procs({"gpus": 1}, name="apart", device="cpu"))
        far: Any = apart.slice(hosts=1).spawn("far", TARGET)
        yield from _between("two agents", apart.slice(hosts=0), far, settings)


def _calling(here: ProcMesh, targets: Any, settings: Settings) -> Iterator[Figure]:
    first, one = here.slice(gpus=0), targets.slice(gpus=0)
    with Relay() as relay, Relay(8) as fan_out:
        samples = interleave(
            {
                "raw relay": relay.call,
                "main thread": lambda: no_op(first).get(TIMEOUT_S),
                "meshbook": lambda: one.no_op.call_one().get(TIMEOUT_S),
            },
            rounds=settings.count(20), per_round=settings.count(50), warmup=50,
        )  # fmt: skip
        yield from side_by_side("actors", "call one", "1 of 8 actors", "us", samples)
        samples = interleave(
            {
                "raw relay": fan_out.call,
                "main thread": lambda: no_op(here).get(TIMEOUT_S),
                "meshbook": lambda: targets.no_op.call().get(TIMEOUT_S),
                "stream": lambda: [part.get(TIMEOUT_S) for part in targets.no_op.stream()],
            },
            rounds=settings.count(20), per_round=settings.count(25), warmup=30,
        )  # fmt: skip
    streamed = samples.pop("stream")
    yield from side_by_side("actors", "call all", "8 actors", "us", samples)
    yield from side_by_side(
        "actors", "stream", "8 actors", "us", {"call all": samples["meshbook"], "meshbook": streamed}
    )


def _pipelined(targets: Any, settings: Settings) -> Iterator[Figure]:
    one = targets.slice(gpus=0)

    def many() -> None:
        for future in [one.no_op.call_one() for _ in range(IN_FLIGHT)]:
            future.get(TIMEOUT_S)

    seconds = interleave({"meshbook": many}, rounds=settings.count(10), per_round=1, warmup=1)["meshbook"]
    rates = summarise([IN_FLIGHT / took for took in seconds])
    yield Figure("actors", "pipelined", "1 of 8 actors", "meshbook", "per s", rates)


def _between(where: str, procs: ProcMesh, target: Any, settings: Settings) -> Iterator[Figure]:
    """procs: of one process, in which the caller lives."""
    caller: Any = procs.spawn("caller", CALLER)
    trips = caller.round_trips.call_one(target, settings.count(1000)).get(TIMEOUT_S)
    yield timed("actors", "actor to actor", where, "us", trips)


def _payloads(targets: Any, settings: Settings) -> Iterator[Figure]:
    one = targets.slice(gpus=0)
    for megabytes, rounds in ((1, 20), (100, 5)):
        payload = np.ones(megabytes * 1_000_000, np.uint8)
        kept = np.ones_like(payload)

        def send(way: Callable[[Any], object], payload: Any = payload) -> Callable[[], object]:
            def changed() -> object:
                payload[0] += 1
                return way(payload)

            return changed

        samples = interleave(
            {
                "memcpy": send(functools.partial(np.copyto, kept)),
                "one": send(lambda payload: one.hold.call_one(payload).get(TIMEOUT_S)),
                "all": send(lambda payload: targets.hold.call(payload).get(TIMEOUT_S)),
            },
            rounds=settings.count(rounds), per_round=3, warmup=4,
        )  # fmt: skip
        targets.hold.call(payload).get(TIMEOUT_S)
        wanted = (len(payload), int(payload[0]))
        assert targets.held.call().get(TIMEOUT_S).values() == [wanted] * 8, "an actor holds something else"
        for size, name in (("1 of 8 actors", "one"), ("8 actors", "all")):
            compared = {"memcpy": samples["memcpy"], "meshbook": samples[name]}
            yield from side_by_side("actors", f"{megabytes} MB argument", size, "ms", compared)
