"""What a call that does nothing costs, to one rank, to all of them, and many at once."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from benchmarks.figures import Figure, Goal, Settings, side_by_side
from benchmarks.floors import RawFanOut, Relay
from benchmarks.stats import interleave, summarise
from benchmarks.subject import TIMEOUT_S, mesh, no_op

QUESTION = (
    "Round trip of a no-op call to one rank and to all of 2-16, and no-op calls per second when none "
    "waits for the one before. Floors with as many real processes in the same run: raw unix sockets, the "
    "same through one relay process (as our host agent)."
)
SIZES = (2, 4, 8, 16)
IN_FLIGHT = 1000


def run(settings: Settings) -> Iterator[Figure]:
    """One rank, then fan-out at each size, then the pipeline."""
    yield from _one(settings.count(20), settings.count(50))
    for ranks in SIZES:
        yield from _all(ranks, settings.count(20), settings.count(25))
    yield from _pipelined(settings.count(10))


def _one(rounds: int, per_round: int) -> Iterator[Figure]:
    """Call rank 0 of 8."""
    with mesh(8) as procs, RawFanOut() as raw, Relay() as relay:
        first = procs.slice(gpus=0)
        subjects = {
            "raw socket": raw.call_one,
            "raw relay": relay.call,
            "meshbook": lambda: no_op(first).get(TIMEOUT_S),
        }
        samples = interleave(subjects, rounds=rounds, per_round=per_round, warmup=50)
    goals = {"raw relay": Goal("x floor", 5.0)}
    yield from side_by_side("calls", "call one", "1 of 8 ranks", "us", samples, goals=goals)


def _all(ranks: int, rounds: int, per_round: int) -> Iterator[Figure]:
    """Call every rank and gather the answers."""
    with mesh(ranks) as procs, RawFanOut(ranks) as raw, Relay(ranks) as relay:
        subjects = {
            "raw socket": raw.call,
            "raw relay": relay.call,
            "meshbook": lambda: no_op(procs).get(TIMEOUT_S),
        }
        samples = interleave(subjects, rounds=rounds, per_round=per_round, warmup=30)
    goals = {"raw relay": Goal("x floor", 5.0)}
    yield from side_by_side("calls", "call all", f"{ranks} ranks", "us", samples, goals=goals)


def _pipelined(rounds: int) -> Iterator[Figure]:
    """Send `IN_FLIGHT` calls before waiting for the first answer."""
    with mesh(8) as procs, RawFanOut() as raw:
        first = procs.slice(gpus=0)

        def ours(target: object) -> None:
            futures = [no_op(target) for _ in range(IN_FLIGHT)]  # type: ignore[arg-type]
            for future in futures:
                future.get(TIMEOUT_S)

        subjects = {
            "raw socket": lambda: raw.pipelined(IN_FLIGHT),
            "meshbook": lambda: ours(first),
            "all 8": lambda: ours(procs),
        }
        samples = interleave(subjects, rounds=rounds, per_round=1, warmup=1)
    everyone = samples.pop("all 8")
    for subject, seconds in samples.items():
        yield from _rate("1 of 8 ranks", subject, seconds, samples)
    yield from _rate("8 ranks", "meshbook", everyone, {})


def _rate(size: str, subject: str, seconds: Sequence[float], floors: dict[str, list[float]]) -> Iterator[Figure]:
    """Calls per second; meshbook's line is repeated for each floor."""
    summary = summarise([IN_FLIGHT / took for took in seconds])
    compared = [name for name in floors if name != "meshbook"] if subject == "meshbook" else []
    for floor in compared or [""]:
        ratio = summarise([IN_FLIGHT / took for took in floors[floor]]).median / summary.median if floor else None
        yield Figure("calls", "pipelined", size, subject, "per s", summary, floor, ratio)
