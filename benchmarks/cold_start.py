"""Spawn one mesh from nothing and print the seconds until every rank has answered a call: run by `spawn.py`.

`python -m benchmarks.cold_start STARTED RANKS [no-torch]`; STARTED is the parent's monotonic clock before our start.
"""

from __future__ import annotations

import sys
import time

import meshbook
from benchmarks.subject import TIMEOUT_S, no_op
from meshbook import this_host

if __name__ == "__main__":
    with this_host().spawn_procs({"gpus": int(sys.argv[2])}, device="cpu", torch="no-torch" not in sys.argv) as procs:
        no_op(procs).get(TIMEOUT_S)
        print(time.monotonic() - float(sys.argv[1]))
    meshbook.shutdown()
