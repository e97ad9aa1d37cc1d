"""The profile of a cell: a trace of all ranks in one file, and a table of where their time went.

profile of cell 7 on ranks 0-3: 0.64 s; waiting in collectives 90%, rank 3 least: 24%
  self time                       calls    median  slowest
  waiting: the backward pass         20  494.1 ms  rank 2  509.7 ms
  cell 7: Python, no operation        1   25.3 ms  rank 3  422.3 ms
"""

from __future__ import annotations

import os
import statistics
import tempfile
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from meshbook.errors import CallInterrupted, MeshError, UsageError
from meshbook.formatting import Table, format_bytes, group_ranks, name_ranks
from meshbook.mesh import states
from meshbook.shape.members import members_of
from meshbook.system.os_errors import explain
from meshbook_extension.notebook.grammar import Option
from meshbook_extension.output.labels import format_seconds, show_tables
from meshbook_extension.output.publisher import CellSink

if TYPE_CHECKING:
    from meshbook.mesh.proc_mesh import ProcMesh
    from meshbook.mesh.profiles import Profile
    from meshbook.profiling.recorder import OpTime, RankTrace
    from meshbook_extension.cells.running import RunningCell

TRACE = Option("--trace", "where the profile's trace goes: a file, or a folder (the notebook's)", str, "PATH")
SUFFIX = ".json.gz"
VIEWER = "https://ui.perfetto.dev"


class CellProfile:
    """The profile of a cell, made before the cell is sent, so that a trace that cannot be written costs no run."""

    def __init__(self, cell_number: int, path: str | None) -> None:
        """path: as `TRACE` takes it. Raises: UsageError if nothing can be written there."""
        self.name = f"cell {cell_number}"
        self._path = trace_path(path, f"profile-cell-{cell_number}")
        self._begun_s = time.time()

    def finish(self, cell: RunningCell, sink: CellSink) -> None:
        """Bring the traces, write the file, show the summary.

        Raises: CallInterrupted; nothing else: the cell's own outcome matters more.
        """
        from meshbook.mesh.profiles import collect

        try:
            profile = collect(cell.procs, self.name, cell.output.done, self._begun_s)
            if profile.traces:
                show_tables(sink, summary(self.name, profile.traces))
                print(self._write(cell.procs, profile))
        except CallInterrupted:
            raise
        except (MeshError, OSError) as error:
            why = explain(error) if isinstance(error, OSError) else str(error)
            print(f"no trace was written to {self._path}: {why}")
            return
        for problem, ranks in group_ranks(profile.problems.items()).items():
            print(f"no profile of {name_ranks(ranks)}: {problem}")

    def _write(self, procs: ProcMesh, profile: Profile) -> str:
        from meshbook.profiling.events import write_trace

        labels, members = {}, members_of(procs.base())
        for part in states.by_host(procs):
            for rank in part.ranks:
                point = ", ".join(f"{axis}={index}" for axis, index in members.point(rank).items())
                labels[rank] = f"rank {rank} ({point}) on {part.name}"
        size = write_trace(self._path, profile.traces, labels)
        left_out = sum(trace.left_out for trace in profile.traces.values())
        notes = [format_bytes(size)]
        if left_out:
            notes.append(f"without the {left_out:,} shortest events")
        if profile.clock_error_s:
            notes.append(f"clocks aligned to {profile.clock_error_s * 1000:.2g} ms")
        return f"trace: {self._path} ({', '.join(notes)})\n  open it at {VIEWER}"


def trace_path(path: str | None, name: str) -> Path:
    """Return the file that ``path`` means; ``name`` is its name where ``path`` is a folder.

    Raises: UsageError if nothing can be written there.
    """
    chosen = Path(path or ".").expanduser().absolute()
    if chosen.is_dir() or (path or "").endswith(os.sep):
        chosen = chosen / name
    base = chosen.name.removesuffix(".gz").removesuffix(".json")
    chosen = chosen.with_name(f"{base}{SUFFIX}")
    try:
        with tempfile.TemporaryFile(dir=chosen.parent):
            return chosen
    except OSError as error:
        raise UsageError(
            f"no trace can be written to {chosen.parent}: {explain(error).partition(':')[0]}\n  choose: --trace PATH"
        ) from None


ROWS = 12
NAME_CHARACTERS = 56
LEAST_SHARE = 0.001
"""The least part of the cell's time on some rank for which an operation is listed."""


def summary(what: str, traces: Mapping[int, RankTrace]) -> list[Table]:
    """Return a table of the operations that took longest, with a line on the whole; a second table for GPUs."""
    tables = [_table("self time", what, traces, lambda op: op.self_s, _head(what, traces))]
    if any(trace.gpu_s for trace in traces.values()):
        tables += [_table("on the GPU", what, traces, lambda op: op.gpu_s, " ")]
    return tables


def _head(what: str, traces: Mapping[int, RankTrace]) -> str:
    longest_s = max(trace.cell_s for trace in traces.values())
    cut = any(trace.is_cut for trace in traces.values())
    text = f"profile of {'the begin of ' if cut else ''}{what} on {name_ranks(traces)}: {format_seconds(longest_s)}"
    waits = {rank: trace.waited_s / trace.cell_s for rank, trace in traces.items() if trace.cell_s}
    text += _share("waiting in collectives", waits)
    if any(trace.gpu_s for trace in traces.values()):
        text += _share("GPU busy", {rank: trace.gpu_s / trace.cell_s for rank, trace in traces.items()})
        text += _share("in NCCL", {rank: trace.gpu_collectives_s / trace.cell_s for rank, trace in traces.items()})
    return text


def _share(name: str, shares: Mapping[int, float]) -> str:
    """Write ``; waiting in collectives 90%, rank 3 least: 24%``; the least matters, since all others wait for it."""
    if not shares or max(shares.values()) < LEAST_SHARE:
        return ""
    least = min(shares, key=lambda rank: shares[rank])
    median = statistics.median(shares.values())
    differs = len(shares) > 1 and median - shares[least] > 0.05
    return f"; {name} {median:.0%}{f', rank {least} least: {shares[least]:.0%}' if differs else ''}"


def _table(
    of: str, what: str, traces: Mapping[int, RankTrace], seconds: Callable[[OpTime], float], title: str
) -> Table:
    """Return a row for each operation: its calls, the median of ranks, and the slowest rank with its time."""
    cell_s = max(trace.cell_s for trace in traces.values())
    found: list[tuple[float, list[str]]] = []
    for name in {name for trace in traces.values() for name in trace.ops}:
        ops = {rank: trace.ops[name] for rank, trace in traces.items() if name in trace.ops}
        times = {rank: seconds(ops[rank]) if rank in ops else 0.0 for rank in traces}
        slowest = max(times, key=lambda rank: times[rank])
        calls = round(statistics.median_low([op.calls for op in ops.values()]))
        median = _short(statistics.median(times.values()))
        shown = f"{what}: Python, no operation" if name == what else name
        shown = shown if len(shown) <= NAME_CHARACTERS else f"{shown[: NAME_CHARACTERS - 3]}..."
        if times[slowest] > LEAST_SHARE * cell_s:
            row = [shown, f"{calls:,}", median, f"rank {slowest}", _short(times[slowest])]
            found.append((times[slowest], row))
    found.sort(key=lambda each: each[0], reverse=True)
    rows = [row for _, row in found[:ROWS]]
    tints = {(number, 4): longest_s / found[0][0] for number, (longest_s, _) in enumerate(found[:ROWS])}
    return Table([of, "calls", "median", "slowest", ""] if rows else (), rows, "<>><>", title, tints=tints)


def _short(seconds: float) -> str:
    """Write milliseconds where seconds would be 0.00."""
    return f"{seconds * 1000:.1f} ms" if seconds < 1 else format_seconds(seconds)
