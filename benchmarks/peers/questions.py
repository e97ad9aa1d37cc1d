"""The questions that are put to every peer, in the words of none of them.

A peer implements `Peer` in the way its own documentation recommends and hands itself to `main`. Answers are
written one JSON object per line, so that those given before a deadline are kept. Needs numpy alone beside the
standard library.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from benchmarks.actor_program import Array
from benchmarks.processes import memory
from benchmarks.stats import repeat, seconds

RANKS = 8
IN_FLIGHT = 500
BUSY_S = 2.0
SETTLE_S = 0.5


class Served(Protocol):
    """What every peer must be able to do; every method returns only when the thing is done."""

    def open(self) -> None:
        """Bring up whatever serves the ranks, with no rank yet."""

    def spawn(self, ranks: int, *, torch: bool) -> None:
        """Start ``ranks`` processes; return when each has answered a call, and has imported torch if that is wanted."""

    def call_one(self) -> object:
        """Call a function that does nothing on one rank."""

    def call_all(self) -> object:
        """Call a function that does nothing on every rank."""

    def pipelined(self, count: int) -> object:
        """Send ``count`` no-op calls to one rank, waiting for none before the last is sent."""

    def hold(self, payload: Array) -> object:
        """Make every rank hold ``payload``."""

    def held(self) -> list[tuple[int, int]]:
        """Return (length, first byte) of what every rank holds."""

    def close(self) -> None:
        """End everything."""


class Peer(Served, Protocol):
    """What a peer must be able to do with ranks."""

    def collect(self) -> Sequence[Array]:
        """Return every rank's array of `COLLECTED_BYTES`, filled with its rank; made on first use."""

    def fail(self, busy_s: float) -> object:
        """Rank 3 raises at once while the others sleep for ``busy_s``; raise when the caller knows."""

    def settle(self) -> object:
        """Wait until every rank is idle again after `fail`."""

    def pids(self) -> list[int]:
        """Return the process of every rank."""

    def stop(self) -> None:
        """End the ranks; `spawn` may follow."""


class ActorPeer(Served, Protocol):
    """What a peer must be able to do with one actor in each process."""

    def stream(self) -> object:
        """Call every actor, taking the answers in the order in which they come."""

    def between(self, count: int) -> list[float]:
        """Return the seconds of each of ``count`` round trips from one actor to another on this host."""

    def between_hosts(self, count: int) -> list[float]:
        """The same from one host to another; two hosts' worth of processes on this machine."""

    def hold_one(self, payload: Array) -> object:
        """Have one actor hold ``payload``."""


class Answers:
    """Where answers go: a file with one JSON object per line."""

    def __init__(self, path: Path) -> None:
        self._file = path.open("a", encoding="utf-8")

    def give(self, question: str, unit: str, samples: Sequence[float]) -> None:
        """Keep the samples of one question; several runs add up."""
        self._write({"question": question, "unit": unit, "samples": list(samples)})

    @contextmanager
    def attempt(self, question: str) -> Iterator[None]:
        """Note why a question has no answer, and go on with the next."""
        try:
            yield
        except Exception as error:
            text = str(error).strip() or type(error).__name__
            self._write({"question": question, "problem": f"{type(error).__name__}: {text.splitlines()[0][:200]}"})

    def _write(self, answer: dict[str, Any]) -> None:
        self._file.write(json.dumps(answer) + "\n")
        self._file.flush()


def main(peer: Peer, actors: ActorPeer) -> None:
    """Ask about ranks, or about actors; see `python -m benchmarks.peers`, which starts us."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--answers", type=Path, required=True)
    parser.add_argument("--started", type=float, required=True, help="monotonic clock before we were started")
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--actors", action="store_true")
    options = parser.parse_args()
    answers = Answers(options.answers)
    served: Served = actors if options.actors else peer
    try:
        served.open()
        served.spawn(RANKS, torch=not options.actors)
        answers.give(f"spawn {RANKS}, from nothing", "s", [time.monotonic() - options.started])
        if options.actors:
            _ask_actors(actors, answers, 60 if options.quick else 300)
        else:
            _ask(peer, answers, quick=options.quick)
    finally:
        served.close()


def _ask(peer: Peer, answers: Answers, *, quick: bool) -> None:
    """All questions after the first spawn, the ones most likely to do harm last."""
    _spawning(peer, answers, 1 if quick else 3)
    _memory(peer, answers)
    _calling(peer, answers, 50 if quick else 300)
    for megabytes, count in ((1, 20), (100, 5 if quick else 9), (500, 0 if quick else 3)):
        if count:
            _holding(peer, answers, megabytes, count)
    with answers.attempt("10 MB from each of 8"):
        arrays = list(peer.collect())
        assert [int(array[-1]) for array in arrays] == list(range(RANKS)), "wrong arrays came back"
        answers.give("10 MB from each of 8", "ms", as_ms(repeat(peer.collect, count=5 if quick else 12, warmup=6)))
    _failing(peer, answers, 2 if quick else 4)


def _ask_actors(peer: ActorPeer, answers: Answers, count: int) -> None:
    _calling(peer, answers, count)
    with answers.attempt(f"stream {RANKS}"):
        answers.give(f"stream {RANKS}", "ms", as_ms(repeat(peer.stream, count=count // 2, warmup=10)))
    for question, between in (("actor to actor", peer.between), ("actor to actor, 2 hosts", peer.between_hosts)):
        with answers.attempt(question):
            answers.give(question, "ms", as_ms(between(count)))
    for megabytes, times in ((1, 20), (100, 5 if count < 100 else 9)):
        _holding(peer, answers, megabytes, times, peer.hold_one, "one")
        _holding(peer, answers, megabytes, times)


def _spawning(peer: Peer, answers: Answers, count: int) -> None:
    """Stop and start the ranks while the service stays up."""
    for _ in range(count):
        answers.give(f"stop {RANKS}", "s", [seconds(peer.stop)])
        answers.give(f"spawn {RANKS}, service up", "s", [seconds(lambda: peer.spawn(RANKS, torch=True))])


def _memory(peer: Peer, answers: Answers) -> None:
    with answers.attempt("PSS per idle rank"):
        time.sleep(SETTLE_S)
        weights = [memory(pid) for pid in peer.pids()]
        answers.give("PSS per idle rank", "MB", [weight.pss_mb for weight in weights])
        answers.give("private per idle rank", "MB", [weight.private_mb for weight in weights])


def _calling(peer: Served, answers: Answers, count: int) -> None:
    with answers.attempt("call one"):
        answers.give("call one", "ms", as_ms(repeat(peer.call_one, count=count, warmup=20)))
    with answers.attempt(f"call {RANKS}"):
        answers.give(f"call {RANKS}", "ms", as_ms(repeat(peer.call_all, count=count // 2, warmup=10)))
    with answers.attempt("pipelined calls"):
        took = repeat(lambda: peer.pipelined(IN_FLIGHT), count=3, warmup=1)
        answers.give("pipelined calls", "per s", [IN_FLIGHT / each for each in took])


def _holding(
    peer: Served,
    answers: Answers,
    megabytes: int,
    count: int,
    send: Callable[[Array], object] | None = None,
    to: str = str(RANKS),
) -> None:
    """Send the same buffer with another first byte each time; the last one is checked on the ranks.

    send: to the first rank alone; without it to all.
    """
    question = f"{megabytes} MB to {to}"
    payload = np.ones(megabytes * 1_000_000, np.uint8)  # zeros would all lie on one page

    def hold() -> None:
        payload[0] += 1
        (send or peer.hold)(payload)

    with answers.attempt(question):
        answers.give(question, "ms", as_ms(repeat(hold, count=count, warmup=4)))
        held = peer.held()
        assert set(held if send is None else held[:1]) == {(len(payload), int(payload[0]))}, "a rank holds another"


def _failing(peer: Peer, answers: Answers, count: int) -> None:
    question = f"error seen, 7 busy for {BUSY_S:g} s"
    with answers.attempt(question):
        for _ in range(count):
            answers.give(question, "ms", as_ms([seconds(lambda: _expect_failure(peer.fail))]))
            peer.settle()


def _expect_failure(fail: Callable[[float], object]) -> None:
    try:
        fail(BUSY_S)
    except Exception as error:
        if "shard 3 is bad" not in f"{error} {error.__cause__}":
            raise
        return
    raise AssertionError("the failure was not reported")


def as_ms(durations_s: Sequence[float]) -> list[float]:
    """Milliseconds of seconds."""
    return [duration * 1000 for duration in durations_s]
