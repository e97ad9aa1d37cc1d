"""The questions about actors, for packages that have them; as `questions`, which serves them."""

from __future__ import annotations

from typing import Protocol

import numpy as np

from benchmarks.peers.questions import IN_FLIGHT, RANKS, Answers, Array, Served, as_ms, serve
from benchmarks.stats import repeat


class ActorPeer(Served, Protocol):
    """What a package must be able to do with one actor in each process."""

    def call_one(self) -> object:
        """Call an endpoint that does nothing of one actor."""

    def call_all(self) -> object:
        """The same of every actor."""

    def stream(self) -> object:
        """The same, taking the answers in the order in which they come."""

    def pipelined(self, count: int) -> object:
        """Send ``count`` empty calls to one actor, waiting for none before the last is sent."""

    def between(self, count: int) -> list[float]:
        """Seconds of each of ``count`` round trips from one actor to another on this host."""

    def between_hosts(self, count: int) -> list[float]:
        """The same from one host to another; two hosts' worth of processes on this machine."""

    def hold_one(self, payload: Array) -> object:
        """Have one actor hold ``payload``."""

    def hold(self, payload: Array) -> object:
        """Have every actor hold it."""

    def held(self) -> list[tuple[int, int]]:
        """Return (length, first byte) of what every actor holds."""


def main(peer: ActorPeer) -> None:
    """Ask ``peer`` everything; see `python -m benchmarks.peers --actors`, which starts us."""
    serve(peer, lambda answers, quick: _ask(peer, answers, 60 if quick else 300))


def _ask(peer: ActorPeer, answers: Answers, count: int) -> None:
    with answers.attempt("call one"):
        answers.give("call one", "ms", as_ms(repeat(peer.call_one, count=count, warmup=20)))
    with answers.attempt(f"call {RANKS}"):
        answers.give(f"call {RANKS}", "ms", as_ms(repeat(peer.call_all, count=count // 2, warmup=10)))
    with answers.attempt(f"stream {RANKS}"):
        answers.give(f"stream {RANKS}", "ms", as_ms(repeat(peer.stream, count=count // 2, warmup=10)))
    with answers.attempt("pipelined calls"):
        took = repeat(lambda: peer.pipelined(IN_FLIGHT), count=3, warmup=1)
        answers.give("pipelined calls", "per s", [IN_FLIGHT / each for each in took])
    with answers.attempt("actor to actor"):
        answers.give("actor to actor", "ms", as_ms(peer.between(count)))
    with answers.attempt("actor to actor, 2 hosts"):
        answers.give("actor to actor, 2 hosts", "ms", as_ms(peer.between_hosts(count)))
    for megabytes, times in ((1, 20), (100, 5 if count < 100 else 9)):
        _holding(peer, answers, megabytes, times)


def _holding(peer: ActorPeer, answers: Answers, megabytes: int, count: int) -> None:
    """Send the same buffer with another first byte each time; the last one is checked."""
    payload = np.ones(megabytes * 1_000_000, np.uint8)
    for question, send in ((f"{megabytes} MB to one", peer.hold_one), (f"{megabytes} MB to {RANKS}", peer.hold)):

        def hold() -> None:
            payload[0] += 1
            send(payload)  # noqa: B023  # called in this turn of the loop only

        with answers.attempt(question):
            answers.give(question, "ms", as_ms(repeat(hold, count=count, warmup=4)))
            wanted = (len(payload), int(payload[0]))
            held = peer.held()
            assert held[0] == wanted and (send == peer.hold_one or held == [wanted] * RANKS), "an actor holds another"
