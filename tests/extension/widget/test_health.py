"""The pure parts of the health widget: states, progress, snapshots, the table of a saved notebook."""

from __future__ import annotations

import json

import pytest
from fakes import failure

import meshbook
import meshbook_extension
from meshbook.errors import FailureKind
from meshbook.groups.deadlock import Verdict
from meshbook.mesh.states import RankStatus
from meshbook.system.devices import GpuUse
from meshbook_extension.notebook.error_log import ErrorLog
from meshbook_extension.output.line_reader import BarProgress, merge_bars
from meshbook_extension.widget.display import as_html, rank_table
from meshbook_extension.widget.health import HealthWidget, NoticeWidget
from meshbook_extension.widget.mesh_source import shown
from meshbook_extension.widget.snapshot import CellNow, History, Rates, Snapshot, letter_of


def status(rank: int = 0, state: str = "busy", where: str = "", host: str = "a", busy_s: float = 1.5) -> RankStatus:
    there = where.startswith("in all_reduce")
    memory = 200_000_000
    return RankStatus(rank, {"gpus": rank}, host, 100 + rank, "cpu", state, busy_s, where, memory, in_collective=there)


@pytest.mark.parametrize(
    ("state", "where", "letter"),
    [
        ("idle", "idle", "I"),
        ("busy", "at train.py:41", "B"),
        ("busy", "in all_reduce (cell 7, line 5)", "C"),
        ("busy", "in time.sleep (cell 7, line 5)", "B"),
        ("pdb", "at train.py:41", "P"),
        ("stopped", "stopped by SIGSTOP", "T"),
        ("silent", "no answer within 0.5 s", "U"),
        ("dead", "exit code 3", "D"),
    ],
)
def test_a_state_has_a_letter(state: str, where: str, letter: str) -> None:
    assert letter_of(status(state=state, where=where)) == letter


def test_an_interrupted_rank_is_told_until_it_is_idle() -> None:
    assert letter_of(status(), interrupted=True) == "X"
    assert letter_of(status(state="idle"), interrupted=True) == "I"


def test_bars_of_ranks_are_merged_and_the_slowest_is_named() -> None:
    merged = merge_bars(
        [
            ((0, 1, 2), "epoch 3:  62%|######    | 620/1000 [00:10<00:06, 61.2it/s, loss=2.3]"),
            ((3,), "epoch 3:  40%|####      | 400/1000 [00:10<01:15, 40.0it/s]"),
        ]
    )
    assert merged is not None
    assert (merged.title, merged.ranks, merged.slowest, merged.left) == ("epoch 3", 4, 3, "01:15")
    assert merged.mean == pytest.approx((3 * 0.62 + 0.4) / 4) and merged.least == 0.4


@pytest.mark.parametrize(
    ("text", "fraction"),
    [
        (" 45%|####5     | 9.00k/20.0k [00:01<00:01, 8.9kB/s]", 0.45),
        ("100%|##########| 10/10 [00:00<00:00, 9.9it/s]", 1.0),
        ("download: 33 %", 0.33),
        ("  0%|          | 0/0 [00:00<?, ?it/s]", 0.0),
    ],
)
def test_bars_of_many_kinds_are_read(text: str, fraction: float) -> None:
    merged = merge_bars([((0,), text)])
    assert merged is not None and merged.mean == pytest.approx(fraction)


def test_what_is_no_bar_is_no_progress() -> None:
    assert merge_bars([((0,), "loss 2.31"), ((), "10%|#|")]) is None


def test_large_meshes_travel_compactly() -> None:
    statuses = [status(rank, where="in all_reduce (cell 7, line 5)", host=f"h{rank // 8}") for rank in range(4096)]
    snapshot = Snapshot("main", "cpu", {"hosts": 512, "gpus": 8}, statuses)
    live = snapshot.live()
    assert live["texts"] == ["in all_reduce (cell 7, line 5)"] and live["states"] == "C" * 4096
    assert len(json.dumps(live)) < 100_000 and len(json.dumps(snapshot.layout())) < 100_000
    assert snapshot.layout()["ranks"] == [] and len(snapshot.layout()["hosts"]) == 512
    assert as_html(snapshot).count("<tr ") == 1 + 512


def test_gpus_are_told_and_without_any_their_columns_are_empty() -> None:
    gpu = GpuUse(83, 38_700_000_000, 80_000_000_000, 33_200_000_000)
    snapshot = Snapshot("main", "cuda", {"gpus": 2}, [status(0)._replace(gpu=gpu), status(1)])
    live = snapshot.live()
    assert (live["gpu_percent"], live["gpu_used_mb"], live["gpu_own_mb"]) == ([83, -1], [38_700, 0], [33_200, 0])
    assert snapshot.layout()["gpu_total_mb"] == [80_000, 0]
    assert "200 MB; GPU 83 %, 38.7 GB of 80 GB" in as_html(snapshot)
    assert "83 %, 38.7 GB of 80 GB" in str(rank_table(snapshot.statuses))
    assert Snapshot("main", "cpu", {"gpus": 1}, [status()]).live()["gpu_percent"] == []


def test_what_the_last_errors_hold_travels_where_it_is_something() -> None:
    live = Snapshot("main", "cpu", {"gpus": 2}, [status(0)._replace(kept_bytes=800_000_000), status(1)]).live()
    assert live["kept_mb"] == [800, 0]
    assert Snapshot("main", "cpu", {"gpus": 1}, [status()]).live()["kept_mb"] == []


def test_charts_show_the_spread_of_the_ranks() -> None:
    history = History()
    for memory in (100, 200):
        statuses = [status(rank)._replace(rss_bytes=memory * rank * 1_000_000) for rank in range(4)]
        waits = [-1, 70, 10, 90]
        history.add(Snapshot("main", "cpu", {"gpus": 4}, statuses, moved=[5_000, 0, 2_000, 9_000], waits=waits))
    assert history.live() == {
        "memory_mb": [(100, 200, 300), (200, 400, 600)],
        "moved_kb_s": [(0, 2, 9)] * 2,
        "gpu_percent": [],
        "waits": [(10, 70, 90)] * 2,
    }


def test_a_rate_is_what_a_counter_gained_since_the_last_reading() -> None:
    rates = Rates()
    assert rates.per_second({0: (100, 500)}, 10.0) == {}
    assert rates.per_second({0: (100, 2_500)}, 12.0) == {0: 1_000}
    assert rates.per_second({0: (100, 9_999)}, 12.1) == {0: 1_000}  # too soon to tell
    assert rates.per_second({0: (7, 10)}, 14.0) == {}  # started again


IN_FORWARD = "in forward (model.py:212)"
HELD = Verdict((2,), (0, 1), 43.0, False, "")
CIRCLE = Verdict((2,), (0, 1), 4.0, True, "")
BAR = BarProgress("epoch 3", 3, 0.62, 0.41, 2, "00:38")
CELL = CellNow("cell 7", 74.2, 3, 0, BAR)
SAID = "cell 7 runs for 74.2 s: epoch 3, 62 %, 00:38 left, rank 2 at 41 %"


@pytest.mark.parametrize(
    ("odd_one", "options", "level", "text", "helps"),
    [
        (status(2, "idle"), {}, "calm", "idle", ()),
        (status(2), {"cells": [CELL]}, "news", SAID, ()),
        (status(2), {"cells": [CELL, CELL]}, "news", f"{SAID}; 1 other cell beside it", ()),
        (status(2), {}, "news", "rank 2 is busy", ()),
        (
            status(2, where=IN_FORWARD),
            {"verdict": HELD, "cells": [CELL]},
            "warning",
            f"rank 2 holds the others up: {IN_FORWARD}, 43.0 s",
            ("stacks", "pdb", "interrupt"),
        ),
        (
            status(2, where=IN_FORWARD),
            {"verdict": CIRCLE},
            "warning",
            "ranks 0-2 wait for each other, 4.00 s",
            ("stacks", "pdb", "interrupt"),
        ),
        (
            status(2),
            {"interrupted": frozenset({2})},
            "warning",
            "rank 2 was interrupted and is still busy",
            ("interrupt", "stacks"),
        ),
        (status(2, "pdb", "at train.py:88"), {}, "news", "rank 2 is stopped in pdb: at train.py:88", ("pdb",)),
        (status(2, "silent", "no answer"), {"verdict": HELD}, "warning", "rank 2 is silent: no answer", ("stacks",)),
        (status(2, "dead", "exit code 3"), {"verdict": HELD}, "bad", "rank 2 is dead: exit code 3", ("heal",)),
    ],
)
def test_the_state_is_one_sentence_with_the_buttons_that_help(
    odd_one: RankStatus, options: dict[str, object], level: str, text: str, helps: tuple[str, ...]
) -> None:
    statuses = [status(0, "idle"), status(1, "idle"), odd_one]
    said = Snapshot("main", "cpu", {"gpus": 3}, statuses, **options).sentence  # type: ignore[arg-type]
    assert (said.level, said.text, said.helps) == (level, text, helps)


def test_hosts_are_counted_as_spawn_counts_them() -> None:
    statuses = [status(rank, "idle") for rank in range(2)]
    assert Snapshot("main", "cpu", {"hosts": 2}, statuses, hosts=2).layout()["host_count"] == 2
    assert Snapshot("main", "cpu", {"hosts": 2}, statuses).layout()["host_count"] == 1


def test_an_error_is_settled_once_its_ranks_have_run_a_cell_well() -> None:
    errors = ErrorLog()
    errors.note("main", "cell 7", [failure(0), failure(1)], [2])
    (error,) = errors.of("main")
    assert not errors.settled("main")
    errors.note("main", "cell 8", [], [0])
    errors.note("other", "cell 9", [], [1])
    assert not errors.settled("main")
    errors.note("main", "cell 10", [], [1])
    assert errors.settled("main") == {error.number}
    live = Snapshot("main", "cpu", {}, [], errors=[error], settled=errors.settled("main")).live()
    assert live["errors"][0] | {"settled": True, "number": error.number, "lost": False} == live["errors"][0]
    assert error.kind is not FailureKind.LOST


def test_modules_of_a_widget_are_joined_into_one_without_imports() -> None:
    for code in (HealthWidget._esm, NoticeWidget._esm):
        assert 'from "./' not in str(code) and str(code).count("export default") == 1


def test_the_saved_table_holds_no_html_of_ranks() -> None:
    html = as_html(Snapshot("<b>", "cpu", {"gpus": 1}, [status(where="in f(<script>)", host="<img>")]))
    assert "<script" not in html and "<img" not in html and "<b>" not in html
    assert "&lt;script&gt;" in html and "busy 1.50 s" in html


def test_equal_errors_are_kept_once_and_interrupts_are_not() -> None:
    errors = ErrorLog()
    errors.note("main", "cell 7", [failure(0), failure(1), failure(2, ename="KeyboardInterrupt")])
    errors.note("other", "cell 8", [failure(0)])
    (error,) = shown(errors.of("main"))
    assert (error.ranks, error.headline, error.where, error.what) == (
        (0, 1),
        "ValueError: bad shard",
        "cell 7, line 3",
        "cell 7",
    )


@pytest.mark.slow
def test_the_widget_is_an_object_for_other_places_and_marimo_takes_it() -> None:
    marimo = pytest.importorskip("marimo")
    with meshbook.this_host().spawn_procs({"gpus": 2}, name="two") as mesh:
        shown = marimo.ui.anywidget(meshbook_extension.health_widget(mesh))
        assert "marimo-anywidget" in shown.text
        assert shown.value["live"]["states"] == "II" and shown.value["layout_of"]["name"] == "two"
    meshbook.shutdown()
