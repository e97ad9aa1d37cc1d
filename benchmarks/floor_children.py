"""The other ends of the floors in `floors.py`: the barest processes that do what a worker does.

`python -m benchmarks.floor_children KIND ARGUMENTS`; each ends when its socket closes or its parent is gone.
"""

from __future__ import annotations

import gc
import os
import select
import socket
import sys
import time

MESSAGE_BYTES = 64


def echo(fd: int) -> None:
    """Send every message back over an inherited unix socket."""
    sock = socket.socket(fileno=fd)
    while message := sock.recv(MESSAGE_BYTES, socket.MSG_WAITALL):
        sock.sendall(message)


def relay(caller_fd: int, *worker_fds: int) -> None:
    """Pass each message of the caller to all workers, and their answers back in one piece."""
    caller = socket.socket(fileno=caller_fd)
    workers = {fd: socket.socket(fileno=fd) for fd in worker_fds}
    poll = select.epoll()
    for fd in workers:
        poll.register(fd, select.EPOLLIN)
    while message := caller.recv(MESSAGE_BYTES, socket.MSG_WAITALL):
        for worker in workers.values():
            worker.sendall(message)
        answers: list[bytes] = []
        while len(answers) < len(workers):
            answers += [workers[fd].recv(MESSAGE_BYTES, socket.MSG_WAITALL) for fd, _ in poll.poll()]
        caller.sendall(b"".join(answers))


def forks(fd: int) -> None:
    """Import torch; for each request of two bytes (a count) fork that many processes, which send their pids.

    The children stay, idle, until the next two; zeros end us.
    """
    import torch.distributed.tensor  # noqa: F401

    gc.collect()
    gc.freeze()
    sock = socket.socket(fileno=fd)
    sock.sendall(b"\0" * 8)
    while count := int.from_bytes(sock.recv(2, socket.MSG_WAITALL), "little"):
        stay_read, stay_write = os.pipe()
        pids = [_fork_idle(sock, stay_read, stay_write) for _ in range(count)]
        sock.recv(2, socket.MSG_WAITALL)
        os.close(stay_write)
        os.close(stay_read)
        for pid in pids:
            os.waitpid(pid, 0)
        sock.sendall(b"\0" * 8)


def _fork_idle(sock: socket.socket, stay_read: int, stay_write: int) -> int:
    pid = os.fork()
    if pid == 0:
        os.close(stay_write)
        sock.sendall(os.getpid().to_bytes(8, "little"))
        os.read(stay_read, 1)
        os._exit(0)
    return pid


def flood(go_fd: int, lines: int) -> None:
    """Say ready, wait until the other end of ``go_fd`` is closed, and print the cheapest way Python has."""
    print("ready", flush=True)
    os.read(go_fd, 1)
    for number in range(lines):
        print(f"line {number} of a flood")


def torch_import(parent_started_s: float) -> None:
    """Print the seconds from ``parent_started_s`` (monotonic, before our start) until torch was imported."""
    import torch  # noqa: F401

    print(time.monotonic() - parent_started_s)


def main(kind: str, *arguments: str) -> None:
    """Run one of the functions above."""
    if kind == "torch_import":
        torch_import(float(arguments[0]))
    else:
        numbers = list(map(int, arguments))
        match kind:
            case "echo":
                echo(*numbers)
            case "relay":
                relay(*numbers)
            case "forks":
                forks(*numbers)
            case "flood":
                flood(*numbers)
            case _:
                raise SystemExit(f"no floor is called {kind}")


if __name__ == "__main__":
    main(*sys.argv[1:])
