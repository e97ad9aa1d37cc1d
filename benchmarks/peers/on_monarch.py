"""torchmonarch: one actor per process; `call` and `call_one`, as its getting-started guide has it.

Hosts are those of a `ProcessJob`.
"""

# mypy: disable-error-code="import-not-found"

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import monarch.actor
from monarch.job import ProcessJob

from benchmarks.peers.monarchs_actors import MonarchsActors
from benchmarks.peers.questions import main


@contextmanager
def two_hosts() -> Iterator[tuple[Any, Any]]:
    """Processes of two processes that stand for hosts."""
    job = ProcessJob({"here": 1, "there": 1})
    job.apply()
    try:
        state = job.state()
        yield state.here.spawn_procs(per_host={"gpus": 1}), state.there.spawn_procs(per_host={"gpus": 1})
    finally:
        job.kill()


if __name__ == "__main__":
    actors = MonarchsActors(monarch.actor, two_hosts)
    main(actors, actors)
