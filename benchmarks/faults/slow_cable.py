"""A long cable to a namespace, which loses packets: two TAP devices, and a process that carries frames between them.

python -m benchmarks.faults.slow_cable LATENCY_S LOSS SEED FD FD     until its stdin ends
"""

from __future__ import annotations

import contextlib
import fcntl
import heapq
import itertools
import os
import random
import select
import struct
import subprocess
import sys
import time

from benchmarks.faults.namespace import Namespace, run_ip

_SET_NAME, _TAP, _NO_HEADER = 0x400454CA, 0x0002, 0x1000
FRAME_BYTES = 1 << 16


class SlowNamespace(Namespace):
    """One way takes ``latency_s``; of the frames a share ``loss`` is lost, each way. Raises as `Namespace` does."""

    def __init__(self, latency_s: float, loss: float, seed: int = 1) -> None:
        self._options = (str(latency_s), str(loss), str(seed))
        self._carrier: subprocess.Popen[bytes] | None = None
        super().__init__()

    def _join(self, ours: str, theirs: str) -> None:
        ends = [_open_tap(ours), _open_tap(theirs)]
        try:
            run_ip("link", "set", theirs, "netns", self.name)
            self._carrier = subprocess.Popen(
                [sys.executable, "-m", "benchmarks.faults.slow_cable", *self._options, *map(str, ends)],
                stdin=subprocess.PIPE,
                pass_fds=ends,
            )
        finally:
            for end in ends:
                os.close(end)

    def close(self) -> None:
        """Also ends the process, and with it the devices."""
        super().close()
        if self._carrier is not None:
            assert self._carrier.stdin is not None
            self._carrier.stdin.close()
            self._carrier.wait(30)


def _open_tap(name: str) -> int:
    end = os.open("/dev/net/tun", os.O_RDWR)
    try:
        fcntl.ioctl(end, _SET_NAME, struct.pack("16sH22x", name.encode(), _TAP | _NO_HEADER))
    except BaseException:
        os.close(end)
        raise
    return end


def carry(latency_s: float, loss: float, draw: random.Random, ends: tuple[int, int]) -> None:
    """Carry frames between the two, in the order of their arrival."""
    numbers, under_way = itertools.count(), list[tuple[float, int, int, bytes]]()
    poll = select.poll()
    for each in (0, *ends):
        poll.register(each, select.POLLIN)
    while True:
        wait_ms = max(0.0, under_way[0][0] - time.monotonic()) * 1000 if under_way else None
        for fd, _ in poll.poll(wait_ms):
            if fd == 0:
                return
            frame = os.read(fd, FRAME_BYTES)
            if draw.random() >= loss:
                other = ends[1] if fd == ends[0] else ends[0]
                heapq.heappush(under_way, (time.monotonic() + latency_s, next(numbers), other, frame))
        while under_way and under_way[0][0] <= time.monotonic():
            _, _, other, frame = heapq.heappop(under_way)
            with contextlib.suppress(OSError):  # that end is down
                os.write(other, frame)


if __name__ == "__main__":
    carry(float(sys.argv[1]), float(sys.argv[2]), random.Random(int(sys.argv[3])), (int(sys.argv[4]), int(sys.argv[5])))
