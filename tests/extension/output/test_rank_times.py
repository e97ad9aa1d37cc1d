"""The ranks' times as people see them: who is slow, at any number of ranks."""

from __future__ import annotations

import pytest

from meshbook_extension.output.rank_times import RankTime, chart, charts, headline, stragglers


def _even(count: int, **slow: float) -> list[RankTime]:
    """Ranks that work 0.4 s, but for ``r3=1.0``, and end together."""
    own = [slow.get(f"r{rank}", 0.4 + rank % 7 / 1000) for rank in range(count)]
    return [RankTime(rank, max(own), max(own) - each) for rank, each in enumerate(own)]


def test_the_headline_names_the_slowest_and_the_median() -> None:
    times = [RankTime(rank, seconds, 0.0) for rank, seconds in enumerate((0.41, 0.4, 0.41, 0.98))]
    assert headline(times) == "[0-3] 0.98 s (slowest rank 3: 0.98 s, median 0.41 s)"
    assert headline(times[:1]) == "[0] 0.41 s" and chart(times[:1]) == ""
    assert headline([RankTime(0, 1.0, 0.25)]) == "[0] 1.00 s (0.25 s of it waiting in collectives)"


def test_a_rank_that_all_wait_for_stands_out_though_all_end_together() -> None:
    times = _even(4, r2=1.0)
    assert headline(times) == (
        "[0-3] 1.00 s (slowest rank 2: 1.00 s of own work, median 0.40 s; up to 0.60 s waiting in collectives)"
    )
    lines = chart(times).splitlines()
    assert lines[2] == "  rank 2  1.00 s  " + "█" * 32 + "  slowest"
    assert lines[1] == "  rank 1  1.00 s  " + "█" * 13 + "░" * 19
    assert lines[-1] == "  █ own work  ░ waiting in collectives"


def test_nobody_is_called_slow_where_all_are_alike() -> None:
    assert "slowest" not in chart(_even(8)) and not stragglers(_even(8))
    assert "░" not in chart([RankTime(rank, 0.5, 0.0) for rank in range(4)])


@pytest.mark.parametrize("count", [17, 64, 4096])
def test_many_ranks_are_grouped(count: int) -> None:
    text = chart(_even(count, r3=1.0, r9=0.97))
    lines = text.splitlines()
    assert len(lines) < 20 and max(map(len, lines)) < 100
    assert lines[0].split()[1] == "3" and lines[0].endswith("slowest") and lines[1].split()[1] == "9"
    assert any(line.endswith("median") for line in lines) and any(line.endswith("fastest") for line in lines)
    assert any(line.split()[:3] == ["0.40-0.48", "s", str(count - 2)] for line in lines), text
    assert "ranks 3,9" in text
    html = "".join(table._repr_html_() for table in charts(_even(count, r3=1.0, r9=0.97)))
    assert html.count("<tr") == html.count("height:11px") == 13 and "slowest" in html and "ranks 3,9" in html


def test_times_of_no_length_are_no_trouble() -> None:
    times = [RankTime(rank, 0.0, 0.0) for rank in range(20)]
    assert "20" in chart(times) and charts(times)
