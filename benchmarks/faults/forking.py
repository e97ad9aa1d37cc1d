"""What the campaign of forks runs on ranks: children of every kind, each of which looks at the data it was given."""

from __future__ import annotations

import contextlib
import fcntl
import multiprocessing
import os
import sys
import time
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch.utils.data import DataLoader, TensorDataset

from meshbook.actor import Actor, ActorMesh, endpoint
from meshbook.errors import UsageError

Data = npt.NDArray[np.float64]

PATIENCE_S = 60.0
WRONG, INTERRUPTED = 99, 5  # exit codes of children: the data changed; KeyboardInterrupt was raised
_PRINTED = "x" * 100_000

_fork = multiprocessing.get_context("fork")
_children: list[tuple[str, int, int]] = []  # what it is, its pid, and the code with which it must end


class Echo(Actor):
    """Whom children must not reach."""

    @endpoint
    def echo(self, number: int) -> int:
        return number


class Forking(Actor):
    """Forks on a thread of its own."""

    def __init__(self, echo: ActorMesh[Any]) -> None:
        self.echo = echo

    @endpoint
    def fork(self, kind: str, number: int, hold_s: float, data: Data) -> list[str]:
        return fork(kind, number, hold_s, data, self.echo)


def fork(kind: str, number: int, hold_s: float, data: Data, echo: ActorMesh[Any]) -> list[str]:
    """Fork children of one kind; returns what was wrong. Those that live on are looked at by `end_children`."""
    wrong = KINDS[kind](number, hold_s, data, echo)
    return [f"{kind} {number}: {text}" for text in wrong]


def is_whole(data: Data, number: int) -> bool:
    """Whether all of it is ``number``."""
    return bool(data.min() == data.max() == number)


def end_children() -> list[str]:
    """Wait for the children; returns which have not ended as they must."""
    wrong = []
    for what, pid, expected in _children:
        deadline = time.monotonic() + PATIENCE_S
        while not (ended := os.waitpid(pid, os.WNOHANG))[0] and time.monotonic() < deadline:
            time.sleep(0.005)
        if not ended[0]:
            os.kill(pid, 9)
            os.waitpid(pid, 0)
            wrong.append(f"{what} hung")
        elif (code := os.waitstatus_to_exitcode(ended[1])) != expected:
            wrong.append(f"{what} ended with {code} instead of {expected}")
    _children.clear()
    return wrong


# ---- kinds -----------------------------------------------------------------------------------------------------------


def _in_child(what: str, number: int, hold_s: float, data: Data, expected: int = 0) -> bool:
    """Fork; True in the child, once it has held on to the data and found it whole."""
    pid = os.fork()
    if pid:
        _children.append((f"{what} {number}", pid, expected))
        return False
    time.sleep(hold_s)
    if not is_whole(data, number):
        os._exit(WRONG)
    return True


def _returns(number: int, hold_s: float, data: Data, echo: ActorMesh[Any]) -> list[str]:
    return ["a child has answered"] if _in_child("a child that returns", number, hold_s, data) else []


def _exits(number: int, hold_s: float, data: Data, echo: ActorMesh[Any]) -> list[str]:
    if _in_child("a child that exits", number, hold_s, data, 7):
        sys.exit(7)
    return []


def _raises(number: int, hold_s: float, data: Data, echo: ActorMesh[Any]) -> list[str]:
    if _in_child("a child that raises", number, hold_s, data, 1):
        os.dup2(os.open(os.devnull, os.O_WRONLY), 2)  # its traceback
        raise ValueError("raised in a child")
    return []


def _asks(number: int, hold_s: float, data: Data, echo: ActorMesh[Any]) -> list[str]:
    """The child calls an actor while its parent does."""
    before = echo.echo.call_one(-number)
    if _in_child("a child that calls an actor", number, hold_s, data):
        try:
            echo.echo.call_one(0)
            os._exit(WRONG)
        except UsageError:
            pass
        try:
            os._exit(0 if before.get(PATIENCE_S) == -number else WRONG)  # it had come before the fork
        except UsageError:
            os._exit(0)
    answers = before.get(PATIENCE_S), echo.echo.call_one(number).get(PATIENCE_S)
    return [] if answers == (-number, number) else [f"the parent got {answers}"]


def _watch(number: int, hold_s: float, data: Data) -> None:
    time.sleep(hold_s)
    os._exit(0 if is_whole(data, number) else WRONG)


def _process(number: int, hold_s: float, data: Data, echo: ActorMesh[Any]) -> list[str]:
    child = _fork.Process(target=_watch, args=(number, hold_s, data))
    child.start()
    _adopt(child, f"a process {number}", 0)
    return []


def _pool(number: int, hold_s: float, data: Data, echo: ActorMesh[Any]) -> list[str]:
    with ProcessPoolExecutor(2, mp_context=_fork) as pool:
        total = sum(pool.map(float, range(8)))
    return [] if total == 28 else [f"a pool has summed {total}"]


def _loader(number: int, hold_s: float, data: Data, echo: ActorMesh[Any]) -> list[str]:
    loader: Any = DataLoader(TensorDataset(torch.from_numpy(data[:64])), batch_size=32, num_workers=1)
    total = sum(float(batch.sum()) for (batch,) in loader)
    return [] if total == 64 * number else [f"a loader has summed {total}"]


def _closes(number: int, hold_s: float, data: Data, echo: ActorMesh[Any]) -> list[str]:
    with contextlib.suppress(OSError):  # a cell and an actor may both do it
        os.close(1 + number % 2)
    return []


def _unblocks(number: int, hold_s: float, data: Data, echo: ActorMesh[Any]) -> list[str]:
    """A child makes the pipes, which it shares, non-blocking; and they are full."""
    if _in_child("a child that changes the pipes", number, 0.0, data):
        for fd in (1, 2):
            fcntl.fcntl(fd, fcntl.F_SETFL, os.O_NONBLOCK | os.O_WRONLY)
        os._exit(0)
    print(_PRINTED)
    return []


def sleep_with_child(number: int, data: Data) -> None:
    """Sleep, once a child does, to be interrupted with it."""
    begun, begin = os.pipe()

    def sleep() -> None:
        try:
            os.write(begin, b".")
            time.sleep(PATIENCE_S)
        except KeyboardInterrupt:
            os._exit(INTERRUPTED if is_whole(data, number) else WRONG)

    child = _fork.Process(target=sleep)
    child.start()
    _adopt(child, f"an interrupted process {number}", INTERRUPTED)
    os.read(begun, 1)
    os.close(begun)
    os.close(begin)
    time.sleep(PATIENCE_S)


def _adopt(child: Any, what: str, expected: int) -> None:
    """Wait for it ourselves, in `end_children`."""
    multiprocessing.process._children.discard(child)  # type: ignore[attr-defined]
    _children.append((what, child.pid, expected))


KINDS: dict[str, Callable[[int, float, Data, ActorMesh[Any]], list[str]]] = {
    "returns": _returns,
    "exits": _exits,
    "raises": _raises,
    "asks": _asks,
    "process": _process,
    "pool": _pool,
    "loader": _loader,
    "closes": _closes,
    "unblocks": _unblocks,
}
