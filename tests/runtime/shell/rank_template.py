"""A template process with a `RankShell`, for test_shell.py: forks a child for each rank that the test asks for.

``python -W error rank_template.py FD``. FD is a unix socket; each request carries (stdout, stderr, commands). The child
makes them its fds 1 and 2 and then obeys the commands: pickled (function name, arguments) pairs, answered in kind.
"""

from __future__ import annotations

import array
import json
import os
import pickle
import signal
import socket
import sys
import threading
from pathlib import Path
from typing import Any

import torch.distributed

from meshbook.shell.shell import RankShell


class RecordingSink:
    """Keeps what it gets, and marks in the text where each display came."""

    def __init__(self) -> None:
        self.displays: list[dict[str, Any]] = []
        self.late: list[tuple[str, str, int]] = []

    def display(self, data: Any, metadata: Any, transient: Any, **options: Any) -> None:
        self.displays.append({"data": data, "metadata": metadata, "transient": transient, **options})
        os.write(1, b"<display>\n")

    def mark_place(self) -> None:
        """Only one pipe is looked at in these tests."""

    def scalars(self, output: int, batches: Any) -> None:
        """Nothing here logs."""

    def late_text(self, stream: str, text: str, cell_id: int) -> None:
        self.late.append((stream, text, cell_id))


class Rank:
    """The commands."""

    def __init__(self, shell: RankShell, rank: int) -> None:
        self.shell, self.sink = shell, RecordingSink()
        shell.start_rank(
            rank=rank, host="a", sink=self.sink, namespace={"rank": rank, "torch": torch, "dist": torch.distributed}
        )

    def run_cell(self, code: str, **options: Any) -> dict[str, Any]:
        before, before_late = len(self.sink.displays), len(self.sink.late)
        outcome = self.shell.run_cell(code, **options)
        failure = outcome.failure
        return {
            "outcome": outcome._replace(
                value=_text(outcome.value), failure=failure and failure._replace(exception=repr(failure.exception))
            ),
            "displays": self.sink.displays[before:],
            "late": self.sink.late[before_late:],
        }

    def define(self, names: dict[str, Any]) -> None:
        self.shell.define(names)

    def evaluate(self, expr: str) -> Any:
        return self.shell.evaluate(expr)

    def describe(self, expr: str) -> Any:
        try:
            return self.shell.evaluate(expr)
        except Exception as error:
            return self.shell.describe(error)._replace(exception=None)

    def late(self) -> Any:
        return self.sink.late

    def facts(self) -> dict[str, Any]:
        return {
            "threads": threading.active_count(),
            "main": sys.modules["__main__"].__dict__ is self.shell.namespace,
        }

    def evaluate_and_flush(self, expr: str) -> Any:
        value = self.shell.evaluate(expr)
        self.shell.flush()
        return _text(value)


def _text(value: object) -> str:
    try:
        return repr(value)[:1000]
    except Exception as error:
        return repr(error)


def serve_rank(shell: RankShell, descriptors: list[int], rank: int) -> None:
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    null = os.open(os.devnull, os.O_RDONLY)
    for source, target in ((null, 0), (descriptors[0], 1), (descriptors[1], 2)):
        os.dup2(source, target)
        os.close(source)
    commands = socket.socket(fileno=descriptors[2]).makefile("rwb")
    served = Rank(shell, rank)
    while True:
        try:
            name, args, kwargs = pickle.load(commands)
        except EOFError:
            return
        except KeyboardInterrupt:  # it came too late for the cell that it was meant for
            continue
        pickle.dump(getattr(served, name)(*args, **kwargs), commands)
        commands.flush()


def main(fd: int) -> None:
    requests = socket.socket(fileno=fd)
    shell = RankShell()
    facts = {
        "threads": len(os.listdir("/proc/self/task")),
        "home": sorted(str(path) for path in Path.home().rglob("*")),
        "main": sys.modules["__main__"].__dict__.get("__doc__"),
    }
    requests.send(json.dumps(facts).encode())
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    while True:
        data, ancillary, _, _ = requests.recvmsg(16, socket.CMSG_SPACE(12))
        if not data:
            requests.close()
            return
        descriptors = array.array("i")
        descriptors.frombytes(ancillary[0][2])
        pid = os.fork()
        if pid == 0:
            code = 1
            try:
                requests.close()
                serve_rank(shell, list(descriptors), int(data))
                code = 0
            except BaseException:
                sys.__excepthook__(*sys.exc_info())
            finally:
                os._exit(code)
        for descriptor in descriptors:
            os.close(descriptor)
        requests.send(b"%d" % pid)


if __name__ == "__main__":
    main(int(sys.argv[1]))
