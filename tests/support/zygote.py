"""Forks processes that have meshbook imported already: run as a script by `controllers`.

Each request is a message (Python source) with two descriptors, the new process's stdin and stdout; the answer is its
pid.
"""

from __future__ import annotations

import os
import signal
import socket
import sys

import meshbook

PRELUDE = """
import os, sys, time
import meshbook
from meshbook import attach, detach, sessions, this_host

def say(*words):
    print(*words, flush=True)

def wait():
    return sys.stdin.readline().strip()
"""


def main() -> None:
    assert meshbook.__version__
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    requests = socket.socket(fileno=int(sys.argv[1]))
    while True:
        code, descriptors, _, _ = socket.recv_fds(requests, 1 << 16, 2)
        if not code:
            return
        pid = os.fork()
        if pid == 0:
            requests.close()
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            for source, target in zip(descriptors, (0, 1), strict=True):
                os.dup2(source, target)
                os.close(source)
            exec(compile(PRELUDE + code.decode(), "<controller>", "exec"), {"__name__": "__main__"})
            return  # by way of atexit, as a script ends
        for descriptor in descriptors:
            os.close(descriptor)
        requests.send(str(pid).encode())


if __name__ == "__main__":
    main()
