"""Meshes of any size for the widget to show, with a bit of everything; no process runs."""

from __future__ import annotations

import math
import time
from collections.abc import Mapping, Sequence
from itertools import product

from meshbook.mesh.states import RankStatus
from meshbook.system.devices import GpuUse
from meshbook_extension.notebook.error_log import LoggedError
from meshbook_extension.output.line_reader import BarProgress
from meshbook_extension.widget.health import ButtonAnswer
from meshbook_extension.widget.snapshot import CellNow, Snapshot

GB = 1 << 30


def simulate(sizes: Mapping[str, int], *, calm: bool = False, per_host: int = 8, tick: int = 0) -> Snapshot:
    """A mesh in the middle of a training cell; ``calm``: all ranks idle."""
    count = math.prod(sizes.values())
    points = [dict(zip(sizes, point, strict=True)) for point in product(*(range(size) for size in sizes.values()))]
    gpus = count > 1
    statuses = [_status(rank, points[rank], f"node-{rank // per_host:03d}", calm, tick, gpus) for rank in range(count)]
    errors = (
        []
        if calm or count == 1
        else [
            LoggedError(
                1,
                "main",
                "cell 6",
                (1,) if count < 64 else tuple(range(40, 48)),
                "ValueError",
                "bad shard <b>17</b>",
                "cell 6, line 12",
                "",
                1.79e9,
            ),
        ]
    )
    bar = BarProgress("epoch 3", count, 0.62 + 0.01 * tick, 0.41, min(5, count - 1), "00:38")
    return Snapshot(
        name="main",
        device="cuda" if gpus else "cpu",
        sizes=sizes,
        statuses=statuses,
        interrupted=frozenset({11} if count >= 64 and not calm else ()),
        cells=[] if calm else [CellNow("cell 7", 74.2 + tick, count, 0, bar)],
        errors=errors,
        at=time.time(),
        moved=[0 if calm else round(9e8 + 4e8 * math.sin(tick / 6) - 3e5 * (rank % 613)) for rank in range(count)],
    )


def _status(rank: int, point: dict[str, int], host: str, calm: bool, tick: int, gpus: bool) -> RankStatus:
    state, where, busy_s = "busy", "in all_reduce (cell 7, line 5)", 74.2 + tick
    if calm:
        state, where, busy_s = "idle", "idle", 0.0
    elif rank % 8 == 5 or rank % 97 == 3:
        where = "in forward (model.py:212)"
    elif rank % 1024 == 1002:
        state, where, busy_s = "dead", "killed by SIGKILL, most likely the OOM killer (RSS 21.9 GB)", 0.0
    elif rank % 777 == 23:
        state, where = "silent", "native code holds the GIL"
    elif rank % 1500 == 44:
        state, where = "pdb", "at train.py:88"
    memory = 2_400_000_000 + (rank * 7919 % 613) * 1_000_000 + 40_000_000 * tick
    gpu = GpuUse(round(88 - rank % 11 + 7 * math.sin(tick)), memory * 14, 80 * GB, memory * 12)
    return RankStatus(
        rank=rank,
        point=point,
        host=host,
        pid=48_000 + rank,
        device=f"cuda:{rank % 8}" if gpus else "cpu",
        state=state,
        busy_s=busy_s,
        where=where,
        in_collective=where.startswith("in all_reduce"),
        rss_bytes=0 if state == "dead" else memory,
        gpu=gpu if gpus and state != "dead" else None,
    )


class SimulatedSource:
    """A `Source` whose time goes on with each snapshot."""

    def __init__(self, sizes: Mapping[str, int], calm: bool = False) -> None:
        self.sizes, self.calm, self.tick = dict(sizes), calm, 0
        self.acted: list[tuple[str, tuple[int, ...]]] = []

    def snapshot(self) -> Snapshot:
        self.tick += 1
        return simulate(self.sizes, calm=self.calm, tick=self.tick)

    def actions(self) -> Sequence[str]:
        return ("interrupt", "stacks", "logs")

    def act(self, action: str, ranks: Sequence[int]) -> ButtonAnswer:
        self.acted.append((action, tuple(ranks)))
        return ButtonAnswer(action, "<img src=x onerror=alert(1)>")
