"""What the runtime opens has numbers above those of the standard streams, whatever user code closes meanwhile."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from meshbook.system.descriptors import fill, replace

CLOSES = """
import itertools, os, socket, threading
from meshbook.system.descriptors import FIRST, above_standard, fill, open_above
from meshbook.system.memory_files import create_memory_file
from meshbook.system.interfaces import connect_to, own_address
from meshbook.values.segments import SegmentPool, map_segment
pool = SegmentPool()
ref = pool.write([bytes(2 << 20)])
kept = os.dup(2)
done = threading.Event()
def close_again_and_again():
    for number in itertools.cycle(range(FIRST)):
        if done.is_set():
            break
        if fill(number, kept):
            os.close(number)
for number in range(FIRST):
    os.close(number)
closing = threading.Thread(target=close_again_and_again, daemon=True)
closing.start()
low = []
for _ in range(300):
    fds = [create_memory_file("test"), open_above(lambda: os.open(os.devnull, os.O_RDONLY))]
    with open_above(lambda: socket.socket()) as sock:
        low += [fd for fd in [*fds, sock.fileno()] if fd < FIRST]
    for fd in fds:
        os.close(fd)
    assert len(map_segment(ref, lambda number: None)[0]) == 2 << 20
own_address()
done.set()
closing.join(30)
with above_standard():
    ends = socket.socketpair()
low += [end.fileno() for end in ends if end.fileno() < FIRST]
os.dup2(kept, 2)
assert not low, low
"""


def test_what_we_open_is_above_the_standard_streams_while_others_close_them() -> None:
    done = subprocess.run([sys.executable, "-c", CLOSES], stderr=subprocess.PIPE, timeout=120)
    assert done.returncode == 0, done.stderr.decode()


def test_filling_replaces_nothing_that_is_open(tmp_path: Path) -> None:
    with (tmp_path / "mine").open("w") as mine, (tmp_path / "other").open("w") as other:
        assert not fill(mine.fileno(), other.fileno())
        assert os.fstat(mine.fileno()).st_ino == (tmp_path / "mine").stat().st_ino
        free = os.dup(other.fileno())
        os.close(free)
        assert fill(free, other.fileno())
        assert os.fstat(free).st_ino == (tmp_path / "other").stat().st_ino
        replace(free, mine.fileno())
        assert os.fstat(free).st_ino == (tmp_path / "mine").stat().st_ino
        os.close(free)
