"""The events of torch.profiler: those of one rank, and the traces of all ranks as one file for Perfetto and Chrome.

In the file each rank is a process. Beside the events of torch.profiler, it has lanes with the operations of its process
groups. Arrows lead from the rank that came last to an operation to the ranks that waited for it there.
"""

from __future__ import annotations

import gzip
import os
import tempfile
import zlib
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, TypeAlias

import msgspec

from meshbook.groups.progress import Operation

if TYPE_CHECKING:
    from meshbook.profiling.recorder import RankTrace

TraceEvent: TypeAlias = dict[str, object]
"""An event as JSON, or the facts that it tells besides."""

MAIN, FIRST_LANE, FIRST_THREAD, FIRST_STREAM = 1, 10, 100, 1000
GPU_KINDS = frozenset({"kernel", "gpu_memcpy", "gpu_memset"})
CPU_KINDS = frozenset({"cpu_op", "user_annotation", "cuda_runtime", "cuda_driver", "python_function"})
_SHOWN = CPU_KINDS | GPU_KINDS
ASIDE = ("gloo:",)
"""Operations of these names run, and wait, on threads of the process group: they are shown, not added up."""
MARGIN_US = 2.0
"""The clock of the profiler and ours agree to about this."""


class Event(msgspec.Struct, omit_defaults=True):
    """An event of Chrome's format, as far as it is kept. ``ts`` and ``dur`` are microseconds."""

    ph: str
    name: str = ""
    cat: str = ""
    pid: int | str | None = None
    tid: int | str | None = None
    ts: float = -1.0
    dur: float = 0.0
    id: int | str | None = None
    bp: str | None = None


class RankEvents:
    """The events of one rank, with times from its base on."""

    def __init__(self, events: list[Event], shift_us: float, main_tid: int) -> None:
        """events: as exported; they are changed. shift_us: the shift added to their times."""
        self._names: dict[int, str] = {MAIN: "main thread"}
        self._tids: dict[tuple[int | str | None, int | str | None], int] = {}
        self._main_tid = main_tid
        self.events: list[Event] = []
        for event in events:
            if (event.ph == "X" and event.cat in _SHOWN) or (event.ph in "sf" and event.cat == "ac2g"):
                event.tid = self._thread(event)
                event.ts += shift_us
                self.events.append(event)

    def _thread(self, event: Event) -> int:
        if event.tid == self._main_tid:
            return MAIN
        known = self._tids.get((event.pid, event.tid))
        if known is None:
            on_gpu = event.cat in GPU_KINDS
            known = len(self._tids) + (FIRST_STREAM if on_gpu else FIRST_THREAD)
            self._tids[event.pid, event.tid] = known
            self._names[known] = f"GPU {event.pid} stream {event.tid}" if on_gpu else f"thread {event.tid}"
        return known

    def add_cell(self, name: str, begun_s: float, ended_s: float) -> None:
        """Add the whole cell, whose own time is the rest that no operation accounts for."""
        self._add(name, "cell", begun_s, ended_s)

    def add_wait(self, name: str, begun_s: float, ended_s: float) -> None:
        """Note a wait of the main thread."""
        margin_s = min(MARGIN_US * 1e-6, (ended_s - begun_s) / 4)  # it must lie inside of what waited
        self._add(name, "wait", begun_s + margin_s, ended_s - margin_s)

    def _add(self, name: str, kind: str, begun_s: float, ended_s: float) -> None:
        self.events.append(Event("X", name, kind, tid=MAIN, ts=begun_s * 1e6, dur=max(0.0, ended_s - begun_s) * 1e6))

    # ---- sums ---------------------------------------------------------------------------------------------------

    def op_times(self) -> dict[str, tuple[int, float, float]]:
        """Return (calls, seconds without its own calls, seconds on GPUs) by name; each kernel has its own name."""
        found: dict[str, list[float]] = {}
        for event, self_us in self._self_times():
            if event.name.startswith(ASIDE):
                continue
            times = found.setdefault(event.name, [0, 0.0, 0.0])
            times[0] += 1
            times[1] += self_us * 1e-6
        for event in self.events:
            if event.cat in GPU_KINDS:
                times = found.setdefault(event.name, [0, 0.0, 0.0])
                times[0] += 1
                times[2] += event.dur * 1e-6
        return {name: (int(calls), own_s, gpu_s) for name, (calls, own_s, gpu_s) in found.items()}

    def _self_times(self) -> Iterator[tuple[Event, float]]:
        """Yield CPU events with the microseconds that their children leave."""
        spans = [event for event in self.events if event.ph == "X" and event.cat not in GPU_KINDS]
        spans.sort(key=lambda event: (event.tid, event.ts, -event.dur))
        stack: list[tuple[Event, float, list[float]]] = []
        thread: int | str | None = None
        for event in spans:
            if event.tid != thread:
                yield from _unwind(stack, float("inf"))
                thread = event.tid
            yield from _unwind(stack, event.ts)
            end = event.ts + event.dur
            if stack:
                end = min(end, stack[-1][1])
                stack[-1][2][0] += end - event.ts
            stack.append((event, end, [0.0]))
        yield from _unwind(stack, float("inf"))

    def gpu_times(self) -> tuple[float, float]:
        """Return the seconds of a busy GPU, and those of kernels of NCCL; overlaps count once."""
        kernels = [event for event in self.events if event.cat in GPU_KINDS]
        return _covered_s(kernels), _covered_s([event for event in kernels if "nccl" in event.name.lower()])

    # ---- what travels -------------------------------------------------------------------------------------------

    def keep_longest(self, count: int) -> int:
        """Drop all but the ``count`` longest events; returns how many those were."""
        dropped = max(0, len(self.events) - count)
        if dropped:
            self.events = sorted(self.events, key=lambda event: event.dur, reverse=True)[:count]
        return dropped

    def chrome(self, rank: int) -> bytes:
        """Return the events as JSON objects with commas between them; the process is the rank."""
        flow_ids = rank << 32
        for event in self.events:
            event.pid = rank
            event.ts, event.dur = round(event.ts, 3), round(event.dur, 3)
            if isinstance(event.id, int):
                event.id += flow_ids
        threads = [line for tid, name in self._names.items() for line in name_thread(rank, tid, name)]
        return msgspec.json.encode([*threads, *self.events])[1:-1]


def meta(name: str, rank: int, tid: int, args: TraceEvent) -> TraceEvent:
    """Return an event with the name or the place of a process or a thread."""
    return {"ph": "M", "name": name, "pid": rank, "tid": tid, "args": args}


def name_thread(rank: int, tid: int, name: str) -> list[TraceEvent]:
    """Return the events that name a thread, and place it among others by its number."""
    return [meta("thread_name", rank, tid, {"name": name}), meta("thread_sort_index", rank, tid, {"sort_index": tid})]


def _unwind(stack: list[tuple[Event, float, list[float]]], now: float) -> Iterator[tuple[Event, float]]:
    """Take the events that have ended by ``now`` off the stack."""
    while stack and stack[-1][1] <= now:
        event, end, inner = stack.pop()
        yield event, max(0.0, end - event.ts - inner[0])


def _covered_s(events: list[Event]) -> float:
    covered, until = 0.0, float("-inf")
    for event in sorted(events, key=lambda event: event.ts):
        end = event.ts + event.dur
        covered += max(0.0, end - max(event.ts, until))
        until = max(until, end)
    return covered * 1e-6


LANES = 8
"""Operations that overlap lie in lanes of their own, up to so many."""
MAX_ARROWS = 20_000
LEAST_WAIT_S = 0.0002
"""The least wait for the last one that gets an arrow."""

_encode = msgspec.json.Encoder().encode


def write_trace(path: Path, traces: Mapping[int, RankTrace], labels: Mapping[int, str]) -> int:
    """Write the file, in place of an earlier one; returns its size in bytes.

    labels: the name of each rank. Raises: OSError.
    """
    lanes = {rank: place_in_lanes(trace.operations) for rank, trace in traces.items()}
    handle, name = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}-")
    try:
        with os.fdopen(handle, "wb") as raw, gzip.GzipFile("", "wb", 3, raw, 0) as file:
            file.write(b'{"displayTimeUnit":"ms","traceEvents":[\n')
            file.write(b",\n".join(_pieces(traces, labels, lanes)))
            file.write(b"\n]}\n")
        os.umask(mask := os.umask(0))
        os.chmod(name, 0o666 & ~mask)
        os.replace(name, path)
    except BaseException:
        os.unlink(name)
        raise
    return path.stat().st_size


def _pieces(
    traces: Mapping[int, RankTrace], labels: Mapping[int, str], lanes: Mapping[int, list[tuple[Operation, int]]]
) -> Iterable[bytes]:
    for rank, trace in traces.items():
        yield _encode(meta("process_name", rank, 0, {"name": labels[rank]}))
        yield _encode(meta("process_sort_index", rank, 0, {"sort_index": rank}))
        for lane in sorted({lane for _, lane in lanes[rank]}):
            name = "collectives" if lane == 0 else f"collectives ({lane + 1})"
            yield from map(_encode, name_thread(rank, FIRST_LANE + lane, name))
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
    """Return each operation with a lane in which no other overlaps it; operations beyond `LANES` are left out."""
    free_at = [float("-inf")] * LANES
    placed = []
    for operation in sorted(operations, key=lambda each: each.begun):
        lane = next((index for index, at in enumerate(free_at) if at <= operation.begun), None)
        if lane is not None:
            free_at[lane] = operation.ended
            placed.append((operation, lane))
    return placed


def arrows(lanes: Mapping[int, list[tuple[Operation, int]]]) -> list[TraceEvent]:
    """Return arrows from the last rank to come to an operation to the waiting ranks, for the longest waits."""
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
