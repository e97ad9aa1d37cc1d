"""The store of logged scalars: bounded, with its spikes, by name, run and rank."""

from __future__ import annotations

import math
import random
import threading
from array import array
from collections.abc import Sequence

import pytest

from meshbook.curves.series import (
    RUNS_KEPT,
    SERIES_POINTS,
    TOTAL_POINTS,
    LoggedPoints,
    Metrics,
    Points,
    Series,
    extremes,
)
from meshbook.curves.table import MetricsTable
from meshbook.errors import UsageError


def points(values: Sequence[float], first_step: float = 0, began_at: float = 0) -> Points:
    steps = array("d", [first_step + n for n in range(len(values))])
    return Points(steps, array("d", [began_at + step for step in steps]), array("d", values))


def batch(name: str, values: Sequence[float], first_step: float = 0, began_at: float = 0) -> LoggedPoints:
    return LoggedPoints(name, len(values), points(values, first_step, began_at))


def test_points_that_fit_are_kept_as_they_are() -> None:
    series, values = Series(), [math.sin(n) for n in range(SERIES_POINTS)]
    for begin in range(0, SERIES_POINTS, 7):
        series.add(7, points(values[begin : begin + 7], begin), SERIES_POINTS)
    assert series.points().values.tolist() == values
    assert series.points().steps.tolist() == list(range(SERIES_POINTS))


@pytest.mark.parametrize("size", [1, 3, 64, 1000])
def test_a_long_series_keeps_its_spikes_its_ends_and_its_order(size: int) -> None:
    series, random_number = Series(), random.Random(size)
    values = [random_number.random() for _ in range(100_000)]
    for at in (17, 31_337, 70_001):
        values[at] = 100.0 + at
    for begin in range(0, len(values), size):
        series.add(len(values[begin : begin + size]), points(values[begin : begin + size], begin), SERIES_POINTS)
    kept = series.points()
    assert SERIES_POINTS // 4 < len(kept.values) <= SERIES_POINTS + 70
    assert {117.0, 31_437.0, 70_101.0} <= set(kept.values)
    assert list(kept.steps) == sorted(kept.steps)
    assert kept.steps[0] < 200
    assert (kept.steps[-1], kept.values[-1]) == (99_999, values[-1])
    assert series.logged == 100_000
    assert series.low == min(values)
    assert all(kept.values[n] == values[int(step)] for n, step in enumerate(kept.steps))
    gaps = [after - before for before, after in zip(kept.steps, kept.steps[1:], strict=False)]
    assert max(gaps) < 1000, "old points are as dense as new ones"


def test_a_value_that_is_not_finite_is_kept_beside_the_highest() -> None:
    values = [1.0, 5.0, math.nan, 2.0]
    assert extremes(values, 0, 4) == [1, 2]
    assert extremes([math.inf, math.inf], 0, 2) == [0]
    assert extremes([3.0, 3.0], 0, 2) == [0]
    series = Series()
    for begin in range(0, 10_000, 100):
        part = [float(n) for n in range(begin, begin + 100)]
        if begin == 5000:
            part[50] = math.nan
        series.add(100, points(part, begin), SERIES_POINTS)
    assert 5050.0 in [
        step for step, value in zip(series.points().steps, series.points().values, strict=True) if math.isnan(value)
    ]
    assert (series.low, series.high) == (0.0, 9999.0)


def test_another_cell_begins_a_run_unless_its_steps_go_on() -> None:
    metrics = Metrics()
    metrics.add(1, 0, [batch("loss", [3.0, 2.0])])
    metrics.add(1, 1, [batch("loss", [3.5, 2.5])])
    metrics.add(2, 0, [batch("loss", [1.0], first_step=2)])
    assert metrics.latest("loss")[0].values.tolist() == [3.0, 2.0, 1.0], "a training that goes on in the next cell"
    metrics.add(3, 0, [batch("loss", [9.0, 8.0], began_at=10)])
    assert list(metrics.latest("loss")) == [0]
    assert metrics.latest("loss")[0].values.tolist() == [9.0, 8.0]
    metrics.add(1, 1, [batch("loss", [2.0], first_step=2)])
    assert metrics.latest("loss")[0].values.tolist() == [9.0, 8.0], "a late word of the first run"
    assert [row.value for row in metrics.rows() if row.run == 1 and row.rank == 1] == [3.5, 2.5, 2.0]
    for output in range(10, 10 + 2 * RUNS_KEPT):
        metrics.add(output, 0, [batch("loss", [0.0], began_at=output)])
    assert {row.run for row in metrics.rows()} == set(range(1, RUNS_KEPT + 1))


def test_cells_that_log_at_the_same_time_are_shown_together() -> None:
    metrics = Metrics()
    for rank in range(4):
        metrics.add(rank, rank, [batch("loss", [1.0], began_at=rank)])
    assert list(metrics.latest("loss")) == [3], "the others may have ended"
    for rank in range(3):
        metrics.add(rank, rank, [batch("loss", [0.5], 1, began_at=rank + 9)])
    assert list(metrics.latest("loss")) == list(metrics.series("loss")) == [0, 1, 2, 3]
    metrics.add(4, 3, [batch("loss", [7.0], began_at=9)])
    assert [series.last for series in metrics.series("loss").values()] == [0.5, 0.5, 0.5, 7.0]
    for output in range(10, 10 + RUNS_KEPT):
        metrics.add(output, 5, [batch("loss", [0.0], began_at=output)])
        metrics.add(0, 0, [batch("loss", [0.2], output, began_at=output)])
    assert metrics.latest("loss")[0].steps[:3].tolist() == [0, 1, 10], "a run that goes on is kept"


def test_a_step_that_goes_back_within_a_cell_is_kept_as_it_is() -> None:
    metrics = Metrics()
    metrics.add(1, 0, [batch("loss", [3.0, 2.0], first_step=5)])
    metrics.add(1, 0, [batch("loss", [1.0], first_step=0)])
    assert metrics.latest("loss")[0].steps.tolist() == [5, 6, 0]


def test_many_series_share_the_memory() -> None:
    metrics = Metrics()
    for begin in range(0, 1500, 500):
        values = [float(n) for n in range(500)]
        for rank in range(64):
            metrics.add(1, rank, [batch(f"name {n}", values, begin) for n in range(64)])
    kept = [len(points.values) for name in metrics.names() for points in metrics.latest(name).values()]
    assert len(kept) == 64 * 64
    assert sum(kept) < 1.1 * TOTAL_POINTS


@pytest.mark.parametrize(
    "columns",
    [(b"", b"", b""), (b"x" * 8, b"x" * 8, b"x" * 16), (b"x" * 7, b"x" * 7, b"x" * 7), (b"\xff" * 8,) * 3],
    ids=["nothing", "of different lengths", "torn", "no step"],
)
def test_columns_that_do_not_fit_are_refused(columns: tuple[bytes, bytes, bytes]) -> None:
    with pytest.raises(ValueError):
        Points.of_bytes(*columns)


def test_the_table_has_a_line_for_each_name_and_a_row_for_each_point() -> None:
    metrics = Metrics()
    for rank in (0, 1):
        metrics.add(1, rank, [batch("loss", [3.0, 1.0 + rank]), batch("lr", [0.5, math.nan])])
    table = MetricsTable([metrics])
    assert repr(table).splitlines() == [
        "name  ranks  step  last  of ranks  min  max  logged",
        "loss    0,1     1   1.5      1..2    1    3       4",
        "lr      0,1     1   nan       nan  0.5  0.5       4",
    ]
    assert [summary.line() for summary in table.summaries()] == [
        "loss 1.5 (0,1: 1..2) at step 1",
        "lr nan (0,1: nan) at step 1",
    ]
    assert [(row.rank, row.step, row.value) for row in MetricsTable([metrics], ["loss"])] == [
        (0, 0.0, 3.0), (0, 1.0, 1.0), (1, 0.0, 3.0), (1, 1.0, 2.0),
    ]  # fmt: skip
    assert ">loss</td>" in table._repr_html_()
    assert "nothing was logged yet" in repr(MetricsTable([Metrics()]))
    with pytest.raises(UsageError, match=r'"los" was never logged. Did you mean "loss"\? Logged so far: loss, lr'):
        MetricsTable([metrics], ["los"])


def test_the_frame_is_that_of_the_library_that_is_there() -> None:
    metrics = Metrics()
    metrics.add(1, 0, [batch("loss", [3.0, 1.0])])
    try:
        frame = MetricsTable([metrics]).frame()
    except UsageError as error:
        assert "pip install pandas" in str(error)
    else:
        assert list(frame.columns) == ["name", "rank", "run", "step", "time", "value"]
        assert len(frame) == 2
        assert len(MetricsTable([Metrics()]).frame()) == 0


def test_the_store_is_safe_for_threads() -> None:
    metrics = Metrics()

    def log(rank: int) -> None:
        for begin in range(0, 2000, 20):
            metrics.add(1, rank, [batch("loss", [1.0] * 20, begin)])
            metrics.latest("loss")

    threads = [threading.Thread(target=log, args=(rank,)) for rank in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert sorted(metrics.latest("loss")) == [0, 1, 2, 3]
    assert all(series.logged == 2000 for series in metrics.series("loss").values())
