"""What an all_reduce on guarded groups costs, and what it costs beside another checkout: `--before DIR`."""

from __future__ import annotations

import contextlib
import statistics
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

from benchmarks import checkout_child
from benchmarks.figures import Figure, Goal, Settings, timed
from benchmarks.stats import summarise

QUESTION = (
    "An all_reduce of 4 bytes and of 4 MB on 2 ranks, and a call that does nothing. With --before DIR the same of "
    "another checkout (its own .venv), in turns in one run; the ratio is the median of those of neighbouring rounds."
)
RANKS = 2
WORKS = (
    ("all_reduce", "4 bytes", "all_reduce 4 400"),
    ("all_reduce", "4 MB", "all_reduce 4194304 12"),
    ("call all", f"{RANKS} ranks", "call 100"),
)
"""What, of which size, and the line for `benchmarks.checkout_child`: a twentieth of a second or so."""
WITHIN = 1.03


def run(settings: Settings) -> Iterator[Figure]:
    """Each work in turns."""
    with contextlib.ExitStack() as stack:
        ours = stack.enter_context(_child(Path(sys.executable)))
        before = settings.before and stack.enter_context(_child(settings.before / ".venv/bin/python"))
        for what, size, line in WORKS:
            if before:
                yield from _compare(what, size, before, ours, line, settings.count(150))
            else:
                seconds = [_ask(ours, line) for _ in range(settings.count(30))]
                yield timed("collectives", what, size, "us", seconds[1:])


def _compare(
    what: str, size: str, before: subprocess.Popen[str], ours: subprocess.Popen[str], line: str, rounds: int
) -> Iterator[Figure]:
    samples: dict[str, list[float]] = {"before": [], "meshbook": []}
    for number in range(-2, rounds):
        socket_turn = [("before", before), ("meshbook", ours)]
        for name, child in socket_turn if number % 2 else reversed(socket_turn):
            seconds = _ask(child, line)
            if number >= 0:
                samples[name].append(seconds)
    yield timed("collectives", what, size, "us", samples["before"], subject="before")
    yield _beside(what, size, samples["before"], samples["meshbook"])


def _beside(what: str, size: str, before: Sequence[float], ours: Sequence[float]) -> Figure:
    ratio = statistics.median(ours / before for ours, before in zip(ours, before, strict=True))
    summary = summarise(ours).scaled(1e6)
    return Figure("collectives", what, size, "meshbook", "us", summary, "before", ratio, Goal("x floor", WITHIN))


@contextlib.contextmanager
def _child(python: Path) -> Iterator[subprocess.Popen[str]]:
    command = [str(python), str(Path(checkout_child.__file__)), str(RANKS)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as child:
        assert child.stdout is not None
        while child.stdout.readline().strip() != "ready":
            if child.poll() is not None:
                raise RuntimeError(f"{python} ended before its mesh was there")
        yield child
        child.communicate()


def _ask(child: subprocess.Popen[str], line: str) -> float:
    assert child.stdin is not None and child.stdout is not None
    child.stdin.write(f"{line}\n")
    child.stdin.flush()
    return float(child.stdout.readline())
