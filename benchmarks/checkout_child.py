"""A mesh of one checkout, driven by the lines of its standard input; run by that checkout's own interpreter.

    call 200             ->  seconds that one call takes, mean of 200
    all_reduce 4 500     ->  seconds of an all_reduce of 4 bytes on all ranks, as rank 0 has it

Needs nothing of `benchmarks`, so that other checkouts can run it.
"""

from __future__ import annotations

import sys
import time

from meshbook import ProcMesh, this_host

TIMEOUT_S = 120.0

ON_RANKS = """
import time
def reduce_often(size_bytes, count):
    x = torch.zeros(size_bytes // 4)
    dist.barrier()
    started = time.perf_counter()
    for _ in range(count): dist.all_reduce(x)
    return (time.perf_counter() - started) / count
"""


def seconds(procs: ProcMesh, words: list[str]) -> float:
    """What one line asks for."""
    if words[0] == "call":
        count = int(words[1])
        started = time.perf_counter()
        for _ in range(count):
            procs.execute(int).get(TIMEOUT_S)
        return (time.perf_counter() - started) / count
    size_bytes, count = map(int, words[1:])
    return float(procs.run(f"reduce_often({size_bytes}, {count})").get(TIMEOUT_S).values()[0])


def main() -> None:
    """Serve until the input ends."""
    with this_host().spawn_procs({"gpus": int(sys.argv[1])}, device="cpu") as procs:
        procs.run(ON_RANKS).get(TIMEOUT_S)
        print("ready", flush=True)
        for line in sys.stdin:
            print(seconds(procs, line.split()), flush=True)


if __name__ == "__main__":
    main()
