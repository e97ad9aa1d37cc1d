"""The profile of one cell: where its trace goes, and what is said of it when the cell has ended, however it did."""

from __future__ import annotations

import os
import tempfile
import time
from pathlib import Path
from typing import TYPE_CHECKING

from meshbook.errors import CallInterrupted, MeshError, UsageError
from meshbook.formatting import format_bytes, group_ranks, name_ranks
from meshbook.system.os_errors import explain
from meshbook_extension.notebook.grammar import Option
from meshbook_extension.output.profile import summary

if TYPE_CHECKING:
    from meshbook.mesh.proc_mesh import ProcMesh
    from meshbook.mesh.profiles import Profile
    from meshbook_extension.cells.running import RunningCell

TRACE = Option("--trace", "where the profile's trace goes: a file, or a folder (the notebook's)", str, "PATH")
SUFFIX = ".json.gz"
VIEWER = "https://ui.perfetto.dev"


class CellProfile:
    """Made before the cell is sent, so that a trace that could not be written costs nobody a run."""

    def __init__(self, cell_number: int, path: str | None) -> None:
        """path: as `TRACE` takes it. Raises: UsageError if nothing can be written there."""
        self.name = f"cell {cell_number}"
        self._path = trace_path(path, f"profile-cell-{cell_number}")
        self._begun_s = time.time()

    def finish(self, cell: RunningCell) -> None:
        """Bring the traces, write the file, print the summary.

        Raises: CallInterrupted; nothing else: the cell's own outcome matters more.
        """
        from meshbook.mesh.profiles import collect

        try:
            profile = collect(cell.procs, self.name, cell.output.done, self._begun_s)
            if profile.traces:
                print(summary(self.name, profile.traces))
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
        from meshbook.profiling.merged_trace import write_trace

        labels = dict(_labels(procs))
        size = write_trace(self._path, profile.traces, {rank: labels[rank] for rank in profile.traces})
        left_out = sum(trace.left_out for trace in profile.traces.values())
        notes = [format_bytes(size)]
        if left_out:
            notes.append(f"without the {left_out:,} shortest events")
        if profile.clock_error_s:
            notes.append(f"clocks aligned to {profile.clock_error_s * 1000:.2g} ms")
        return f"trace: {self._path} ({', '.join(notes)})\n  open it at {VIEWER}"


def _labels(procs: ProcMesh) -> list[tuple[int, str]]:
    """``rank 3 (gpus=3) on node7``, by rank."""
    hosts = {rank: part.name for part in procs.by_host() for rank in part.ranks}
    whole = procs.base()
    points = {rank: ", ".join(f"{axis}={index}" for axis, index in whole.members.point(rank).items()) for rank in hosts}
    return [(rank, f"rank {rank} ({points[rank]}) on {hosts[rank]}") for rank in hosts]


def trace_path(path: str | None, name: str) -> Path:
    """The file that ``path`` means; ``name`` is its own where that is a folder.

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
