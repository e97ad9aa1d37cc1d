"""The traces of all ranks as one file that Perfetto and Chrome show: a process for each rank.

Beside what torch.profiler saw, each rank has lanes with the operations of its process groups. Arrows lead from the
rank that came last to an operation to those that waited for it there.
"""

from __future__ import annotations

import gzip
import os
import tempfile
import zlib
from collections.abc import Iterable, Mapping
from pathlib import Path

import msgspec

from meshbook.groups.progress import Operation
from meshbook.profiling.events import FIRST_LANE, TraceEvent, meta
from meshbook.profiling.recorder import RankTrace

LANES = 8
"""Operations that overlap lie in lanes of their own, up to so many."""
MAX_ARROWS = 20_000
LEAST_WAIT_S = 0.0002
"""Who waited less for the last one gets no arrow."""

_encode = msgspec.json.Encoder().encode


def write_trace(path: Path, traces: Mapping[int, RankTrace], labels: Mapping[int, str]) -> int:
    """Write the file, in place of an earlier one; returns its size in bytes.

    labels: what each rank is called. Raises: OSError.
    """
    lanes = {rank: place_in_lanes(trace.operations) for rank, trace in traces.items()}
    handle, name = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}-")
    try:
        with os.fdopen(handle, "wb") as raw, gzip.GzipFile("", "wb", 3, raw, 0) as file:
            file.write(b'{"displayTimeUnit":"ms","traceEvents":[\n')
            file.write(b",\n".join(_pieces(traces, labels, lanes)))
            file.write(b"\n]}\n")
        os.chmod(name, 0o666 & ~_umask())
        os.replace(name, path)
    except BaseException:
        os.unlink(name)
        raise
    return path.stat().st_size


def _umask() -> int:
    mask = os.umask(0)
    os.umask(mask)
    return mask


def _pieces(
    traces: Mapping[int, RankTrace], labels: Mapping[int, str], lanes: Mapping[int, list[tuple[Operation, int]]]
) -> Iterable[bytes]:
    for rank, trace in traces.items():
        yield _encode(meta("process_name", rank, 0, {"name": labels[rank]}))
        yield _encode(meta("process_sort_index", rank, 0, {"sort_index": rank}))
        for lane in sorted({lane for _, lane in lanes[rank]}):
            name = "collectives" if lane == 0 else f"collectives ({lane + 1})"
            yield _encode(meta("thread_name", rank, FIRST_LANE + lane, {"name": name}))
            yield _encode(meta("thread_sort_index", rank, FIRST_LANE + lane, {"sort_index": FIRST_LANE + lane}))
        for operation, lane in lanes[rank]:
            yield _encode(_span(rank, operation, lane))
        if events := zlib.decompress(trace.events) if trace.events else b"":
            yield events
    yield from map(_encode, arrows(lanes))


def _span(rank: int, operation: Operation, lane: int) -> TraceEvent:
    return {
        "ph": "X",
        "cat": "collective",
        "name": operation.name,
        "pid": rank,
        "tid": FIRST_LANE + lane,
        "ts": round(operation.begun * 1e6, 3),
        "dur": round((operation.ended - operation.begun) * 1e6, 3),
        "args": {"group": operation.group, "number": operation.number},
    }


def place_in_lanes(operations: Iterable[Operation]) -> list[tuple[Operation, int]]:
    """Each operation with a lane in which no other overlaps it; what finds none of `LANES` is left out."""
    free_at = [float("-inf")] * LANES
    placed = []
    for operation in sorted(operations, key=lambda each: each.begun):
        lane = next((index for index, at in enumerate(free_at) if at <= operation.begun), None)
        if lane is not None:
            free_at[lane] = operation.ended
            placed.append((operation, lane))
    return placed


def arrows(lanes: Mapping[int, list[tuple[Operation, int]]]) -> list[TraceEvent]:
    """From the last one to come to an operation to those that waited for it; for the longest waits."""
    members: dict[tuple[int, str, int], list[tuple[int, Operation, int]]] = {}
    for rank, placed in lanes.items():
        for operation, lane in placed:
            if operation.is_collective:
                key = (operation.epoch, operation.group, operation.number)
                members.setdefault(key, []).append((rank, operation, lane))
    found = []
    for group in members.values():
        last = max(group, key=lambda member: member[1].begun)
        for member in group:
            waited_s = last[1].begun - member[1].begun
            if waited_s > LEAST_WAIT_S:
                found.append((waited_s, last, member))
    found.sort(key=lambda arrow: arrow[0], reverse=True)
    made = []
    for number, (_, last, member) in enumerate(found[:MAX_ARROWS], 1):
        common = {"cat": "waited for", "name": "waited for", "id": number}
        made.append({"ph": "s", **common, **_end(last, last[1].begun)})
        made.append({"ph": "f", "bp": "e", **common, **_end(member, max(last[1].begun, member[1].ended))})
    return made


def _end(member: tuple[int, Operation, int], at_s: float) -> TraceEvent:
    rank, operation, lane = member
    inside_s = min(max(at_s, operation.begun), operation.ended)
    return {"pid": rank, "tid": FIRST_LANE + lane, "ts": round(inside_s * 1e6, 3)}
