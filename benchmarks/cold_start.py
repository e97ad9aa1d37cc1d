"""Spawn one mesh from nothing and print the seconds it took: run by `spawn.py` in a fresh interpreter.

`python -m benchmarks.cold_start STARTED RANKS`; STARTED is the parent's monotonic clock before it started us.
"""

from __future__ import annotations

import sys
import time

from benchmarks.subject import TIMEOUT_S, mesh, no_op


def main(started_s: float, ranks: int) -> None:
    """Print the seconds until every rank has answered a call."""
    with mesh(ranks) as procs:
        no_op(procs).get(TIMEOUT_S)
        print(time.monotonic() - started_s)


if __name__ == "__main__":
    main(float(sys.argv[1]), int(sys.argv[2]))
