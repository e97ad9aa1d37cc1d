"""What it costs to bring bytes to every rank, and back from every rank."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import torch

from benchmarks.figures import Figure, Goal, Settings, side_by_side
from benchmarks.floors import Memcpy
from benchmarks.stats import interleave
from benchmarks.subject import TIMEOUT_S, mesh

QUESTION = (
    "Push one array to 8 ranks so that each holds it, and pull 10 MB from each of 8; warm, payload "
    "changed each time. Floor: one copy of the same bytes in memory, in the same run."
)
RANKS = 8
MEGABYTES = (1, 100, 500)
PULLED_MB = 10
CALL_MS = 0.75  # a call to 8 ranks, of `benchmarks.calls`


def run(settings: Settings) -> Iterator[Figure]:
    """Push at each size as an array, once as a tensor; then pull and gather."""
    for megabytes in MEGABYTES:
        if not (settings.quick and megabytes > 100):
            yield from _push(megabytes, settings.count(60 if megabytes == 1 else 15), tensor=False)
    yield from _push(100, settings.count(15), tensor=True)
    yield from _pull(settings.count(20))


def _push(megabytes: int, rounds: int, *, tensor: bool) -> Iterator[Figure]:
    """From the caller to all ranks; each is asked afterwards whether it holds the last one."""
    source = np.ones(megabytes * 1_000_000, np.uint8)  # zeros would all lie on one page
    payload = torch.from_numpy(source) if tensor else source
    memcpy = Memcpy(len(source))
    with mesh(RANKS) as procs:

        def push() -> None:
            source[0] = (int(source[0]) + 1) % 250
            procs.push({"payload": payload}).get(TIMEOUT_S)

        samples = interleave({"memcpy": memcpy.copy, "meshbook": push}, rounds=rounds, per_round=1, warmup=3)
        held = procs.evaluate("(len(payload), int(payload[0]))").get(TIMEOUT_S)
        if any(value != (len(source), int(source[0])) for value in held.values()):
            raise AssertionError(f"a rank holds something else than what was pushed: {list(held.values())}")
    goals = {"memcpy": Goal("x floor", 1.3)} if megabytes >= 100 else {"meshbook": Goal("at most", CALL_MS + 0.5)}
    what = "push tensor" if tensor else "push array"
    yield from side_by_side("payloads", what, f"{megabytes} MB to {RANKS}", "ms", samples, goals=goals)


def _pull(rounds: int) -> Iterator[Figure]:
    """From all ranks to the caller: as one value per rank, and joined along the first dim."""
    size = PULLED_MB * 1_000_000
    memcpy = Memcpy(size * RANKS)
    with mesh(RANKS) as procs:
        procs.run(f"import numpy\npayload = numpy.full({size}, rank, numpy.uint8)").get(TIMEOUT_S)

        def pull() -> None:
            values = list(procs.pull("payload").get(TIMEOUT_S).values())
            assert [int(value[-1]) for value in values] == list(range(RANKS))

        def gather() -> None:
            joined = procs.gather("payload").get(TIMEOUT_S)
            assert len(joined) == size * RANKS

        subjects = {"memcpy": memcpy.copy, "meshbook": pull, "gather": gather}
        samples = interleave(subjects, rounds=rounds, per_round=1, warmup=3)
    gathered = samples.pop("gather")
    size_name = f"{PULLED_MB} MB from each of {RANKS}"
    goals = {"memcpy": Goal("x floor", 2)}
    yield from side_by_side("payloads", "pull", size_name, "ms", samples, goals=goals)
    both = {"memcpy": samples["memcpy"], "meshbook": gathered}
    yield from side_by_side("payloads", "gather (joined)", size_name, "ms", both, goals=goals)
