"""Spawn one mesh from nothing and print what it took, as JSON: run by `spawn.py` in a fresh interpreter.

`python -m benchmarks.cold_start STARTED HOSTS RANKS [no-torch]`, with ranks of each host; STARTED is the parent's
monotonic clock before it started us.
"""

from __future__ import annotations

import json
import os
import resource
import sys
import time
from typing import Any

import meshbook
from benchmarks.processes import descendants, memory
from benchmarks.subject import TIMEOUT_S, no_op
from meshbook import this_host


def main(started_s: float, hosts: int, ranks: int, *, torch: bool) -> None:
    """Print the seconds until every rank has answered a call, CPU seconds of all other processes, and their PSS."""
    where = this_host() if hosts == 1 else meshbook.start_hosts({"hosts": hosts}, meshbook.LocalLauncher())
    options: dict[str, Any] = {} if torch else {"torch": False}  # a checkout from before may know no such option
    with where.spawn_procs({"gpus": ranks}, device="cpu", **options) as procs:
        no_op(procs).get(TIMEOUT_S)
        took_s = time.monotonic() - started_s
        pss_mb = sum(memory(pid).pss_mb for pid in descendants(os.getpid()))
    meshbook.shutdown()
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    print(json.dumps([took_s, used.ru_utime + used.ru_stime, pss_mb]))


if __name__ == "__main__":
    main(float(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]), torch="no-torch" not in sys.argv)
