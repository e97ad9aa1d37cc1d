"""torchmonarch's tensor engine: CPU seconds of the thread that asks for a small add on two ranks, as JSON.

.bench/monarch/bin/python -m benchmarks.peers.tensors_on_monarch     `make bench-peers` makes that interpreter
"""

# mypy: disable-error-code="import-not-found"

from __future__ import annotations

import json
import time

import torch
from monarch import inspect
from monarch.actor import this_host

ROUNDS, ADDS = 10, 300


def main() -> None:
    procs = this_host().spawn_procs(per_host={"gpus": 2})
    seconds = []
    with procs.activate(), torch.no_grad():
        x, y = torch.ones(16, 16), torch.ones(16, 16)
        last = x + y
    for _ in range(ROUNDS):
        inspect(last, gpus=0)  # outside of the mesh: what comes back is a tensor of this process
        with procs.activate(), torch.no_grad():
            started = time.thread_time()
            for _ in range(ADDS):
                last = x + y
            seconds.append((time.thread_time() - started) / ADDS)
    print(json.dumps(seconds), flush=True)


if __name__ == "__main__":
    main()
