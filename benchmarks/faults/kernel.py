"""A kernel that may be killed at any moment: it spawns a mesh or attaches to it, and sends calls until it dies.

`python -m benchmarks.faults.kernel [--lone | --spread] [SESSION]` writes a line for each thing that a person would see:
``ready SECONDS``, ``answer NUMBER``, ``adopted NUMBER``. A line ``end`` on stdin has it write the ledgers and stop the
mesh.
``--lone``: each call goes to one rank, when the one before is answered; ``--spread``: to several.
"""

from __future__ import annotations

import json
import os
import select
import sys
from collections import deque
from typing import Any

import meshbook
from benchmarks.faults import on_rank
from meshbook import Future, ProcMesh

RANKS = 2
SPREAD_OVER = 4
UNDER_WAY = 20
DEADLINE_S = 15.0


def main(session: str | None, ranks: int, most: int) -> None:
    """Work until told to end, or killed. most: so many calls are under way."""
    mesh = _spawn(ranks) if session is None else _attach(session)
    number = max((max(ledger, default=0) for ledger in _ledgers(mesh)), default=0)
    under_way: deque[tuple[int, Future[Any]]] = deque()
    while not select.select([0], [], [], 0)[0]:
        number += 1
        work = on_rank.note_slowly if most == 1 and number % 23 == 0 else on_rank.note
        under_way.append((number, mesh.execute(work, number)))
        if len(under_way) >= most:
            _tell("answer", _take(*under_way.popleft()))
    while under_way:
        _tell("answer", _take(*under_way.popleft()))
    _tell("ledgers", json.dumps(_ledgers(mesh)))
    meshbook.shutdown()


def _spawn(ranks: int) -> ProcMesh:
    mesh = meshbook.this_host().spawn_procs({"gpus": ranks}, name="kept", device="cpu")
    mesh.run("ledger = []").get(DEADLINE_S)
    _tell("session", next(session.id for session in meshbook.sessions() if session.is_ours))
    _tell("ready", 0.0)
    return mesh


def _attach(session: str) -> ProcMesh:
    attachment = meshbook.attach(session, timeout_s=DEADLINE_S)
    _tell("ready", attachment.took_s)
    for call in attachment.calls:
        values = call.future.get(DEADLINE_S).values()
        if any(value != values[0] for value in values):  # of a ledger, too, that was asked for
            _tell("wrong", f"an adopted call gave {values}")
        if isinstance(values[0], int | float):
            _tell("adopted", int(values[0]))
    return attachment.mesh("kept")


def _take(number: int, future: Future[Any]) -> int:
    values = future.get(DEADLINE_S).values()
    if set(values) != {number}:
        _tell("wrong", f"call {number} gave {values}")
    return number


def _ledgers(mesh: ProcMesh) -> list[list[int]]:
    return list(mesh.pull("ledger").get(DEADLINE_S).values())


def _tell(what: str, value: object) -> None:
    os.write(1, f"{what} {value}\n".encode())


if __name__ == "__main__":
    *options, last = sys.argv
    size = (1, 1) if "--lone" in sys.argv else (SPREAD_OVER, 1) if "--spread" in sys.argv else (RANKS, UNDER_WAY)
    main(None if not options or last.startswith("-") else last, *size)
