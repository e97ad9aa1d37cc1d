"""``%%mesh --profile`` and ``%mesh profile``: what a person sees, and the file."""

from __future__ import annotations

import gzip
import json
import os
from pathlib import Path

import pytest

from meshbook.errors import UsageError
from meshbook.profiling.recorder import OpTime, RankTrace
from meshbook_extension.cells.profile import summary, trace_path

CELL = """
import time
time.sleep(2 if rank == 2 else 0)  # more than a busy machine holds up another rank
(torch.ones(50, 50) @ torch.ones(50, 50)).sum()
dist.all_reduce(torch.ones(1))
rank"""


@pytest.mark.slow
def test_a_cell_is_profiled_on_all_ranks(notebook, tmp_path: Path) -> None:
    ran = notebook.run(f"%%mesh --profile --trace {tmp_path}/step\n{CELL}")
    head, columns, *rows = ran.stdout.splitlines()
    assert head.startswith("profile of cell ") and "on ranks 0-3: " in head
    assert "waiting in collectives" in head and ", rank 2 least: " in head
    assert columns.split() == ["self", "time", "calls", "median", "slowest"]
    assert any("Python, no operation" in row and "rank 2" in row for row in rows[:2])
    assert any(row.strip().startswith("waiting: all_reduce") for row in rows)
    assert rows[-2].startswith(f"trace: {tmp_path}/step.json.gz (") and rows[-1].endswith("https://ui.perfetto.dev")
    events = json.loads(gzip.decompress((tmp_path / "step.json.gz").read_bytes()))["traceEvents"]
    names = [event["args"]["name"] for event in events if event["name"] == "process_name"]
    assert [name.partition(" on ")[0] for name in names] == [f"rank {rank} (gpus={rank})" for rank in range(4)]
    assert notebook["_mesh"].values() == [0, 1, 2, 3]


def test_a_statement_is_profiled_on_a_part(notebook, tmp_path: Path) -> None:
    text = notebook.run(f"%mesh profile --trace {tmp_path} rank=1 torch.rand(1_000_000).sort()").stdout
    assert "on rank 1: " in text and "aten::sort" in text
    (file,) = tmp_path.iterdir()
    assert file.name.startswith("profile-cell-") and file.name.endswith(".json.gz")


def test_a_cell_that_fails_or_is_late_keeps_what_was_recorded(notebook, tmp_path: Path) -> None:
    text = notebook.fail(f"%%mesh --profile --trace {tmp_path}/failed\ntorch.ones(3).cumsum(0)\n1/0")
    assert text.count("Traceback (most recent call last)") == 1 and "trace: " in text
    text = notebook.fail(f"%%mesh --profile --timeout 0.5 --trace {tmp_path}/late\nimport time; time.sleep(30)")
    assert "Python, no operation" in text and "took more than 0.5 s" in text
    assert sorted(os.listdir(tmp_path)) == ["failed.json.gz", "late.json.gz"]


def test_a_folder_that_cannot_be_written_is_told_before_the_cell_runs(notebook, tmp_path: Path) -> None:
    text = notebook.fail(f"%%mesh --profile --trace {tmp_path}/none/x\nprint('ran')")
    assert f"no trace can be written to {tmp_path}/none: no such file or directory" in text and "ran" not in text
    assert "--profile does not go with --async" in notebook.fail("%%mesh --profile --async\n1")


def test_paths_are_files_or_folders(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert trace_path(None, "cell") == tmp_path / "cell.json.gz"
    assert trace_path(str(tmp_path), "cell") == tmp_path / "cell.json.gz"
    for text in ("a", "a.json", "a.json.gz"):
        assert trace_path(text, "cell") == tmp_path / "a.json.gz"
    with pytest.raises(UsageError, match="no trace can be written"):
        trace_path("none/", "cell")


def test_the_summary_names_the_rank_that_waits_least() -> None:
    ops = {"mm": OpTime(20, 0.2, 0.0), "tiny": OpTime(1, 0.0001, 0.0)}
    slow = {"mm": OpTime(20, 0.9, 0.0)}
    traces = {
        rank: RankTrace("", 1.0, 0.05 if rank == 3 else 0.75, ops=slow if rank == 3 else ops) for rank in range(8)
    }
    (table,) = summary("cell 7", traces)
    assert str(table).splitlines() == [
        "profile of cell 7 on ranks 0-7: 1.00 s; waiting in collectives 75%, rank 3 least: 5%",
        "  self time  calls    median  slowest",
        "  mm            20  200.0 ms  rank 3   900.0 ms",
    ]
