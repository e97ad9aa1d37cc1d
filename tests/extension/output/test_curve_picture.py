"""Pictures of logged scalars: well-formed, bounded, and with what a person looks for in them."""

from __future__ import annotations

import math
from array import array
from collections.abc import Sequence
from xml.etree import ElementTree

import pytest

from meshbook.curves.series import LoggedPoints, Metrics, Points
from meshbook_extension.cells.curves import curves_of
from meshbook_extension.output.curve_picture import PANELS, Look, bundle

SVG = "{http://www.w3.org/2000/svg}"


def logged(**names: dict[int | None, Sequence[float]]) -> Metrics:
    metrics = Metrics()
    for name, ranks in names.items():
        for rank, values in ranks.items():
            steps = array("d", range(len(values)))
            times = array("d", [1e9 + 0.5 * step + 0.01 * (rank or 0) for step in steps])
            metrics.add(1, rank, [LoggedPoints(name, len(values), Points(steps, times, array("d", values)))])
    return metrics


def draw(metrics: Metrics, look: Look | None = None) -> tuple[ElementTree.Element, str, str]:
    """The SVG alone, the HTML and the text."""
    drawn = bundle(curves_of(metrics, metrics.names()), look or Look())
    ElementTree.fromstring(f"<body>{drawn['text/html']}</body>")
    return ElementTree.fromstring(str(drawn["image/svg+xml"])), str(drawn["text/html"]), str(drawn["text/plain"])


def lines(svg: ElementTree.Element) -> list[str]:
    return [path.get("d", "") for path in svg.iter(f"{SVG}path") if path.get("stroke-width") == "1.6"]


def test_the_mean_is_a_line_and_the_range_a_band() -> None:
    svg, html, text = draw(logged(loss={rank: [3.0 + rank, 1.0 + rank] for rank in range(4)}))
    assert lines(svg) == ["M50.0 66.8L348.0 121.2"]
    assert [path for path in svg.iter(f"{SVG}path") if path.get("opacity") == ".22"]
    assert "ranks 0-3: mean, range" in html
    assert "currentColor" in html
    assert "max-width:100%" in html
    assert "<title>mean: 2.5 at 1</title>" in html
    assert text == "loss 2.5 (0-3: 1..4) at step 1"


def test_each_rank_has_a_line_on_demand() -> None:
    svg, html, _ = draw(logged(loss={rank: [3.0 + rank, 1.0] for rank in range(3)}), Look(by_rank=True))
    assert len(lines(svg)) == 3
    assert "<title>rank 2: 5 at 0</title>" in html


def test_a_value_that_is_not_finite_is_a_gap_with_a_mark() -> None:
    svg, html, text = draw(logged(loss={0: [1.0, 2.0, math.nan, math.inf, 3.0, 4.0]}))
    assert [line.count("M") for line in lines(svg)] == [2]
    assert "<title>0: nan at 2</title>" in html
    assert "<title>0: inf at 3</title>" in html
    assert text == "loss 4 at step 5"


def test_a_logarithmic_axis_leaves_out_what_it_cannot_show() -> None:
    svg, html, _ = draw(logged(lr={0: [1e-1, 1e-3, 0.0, 1e-5]}), Look(log=True))
    assert [line.count("M") for line in lines(svg)] == [2]
    assert ">1e-05</text>" in html
    assert "<title>0: 0 at 2</title>" in html


def test_smoothing_keeps_the_values_behind_the_line() -> None:
    svg, html, _ = draw(logged(loss={0: [0.0, 1.0] * 100}), Look(smooth=0.9))
    heights = [float(point.split(" ")[1]) for point in lines(svg)[0][1:].split("L")]
    assert max(heights[50:]) - min(heights[50:]) < 15
    assert "smooth 0.9" in html
    assert "opacity='.3'" in html


def test_ranks_whose_times_differ_share_the_columns() -> None:
    svg, html, _ = draw(logged(loss={rank: [float(n) for n in range(400)] for rank in range(4)}), Look(by_time=True))
    assert 100 < lines(svg)[0].count("L") <= 160
    assert ">min</text>" in html


@pytest.mark.parametrize(
    "values",
    [
        [1.0],
        [0.0, 0.0, 0.0],
        [math.nan],
        [math.nan, math.inf],
        [1.7e308, -1.7e308, 1.0],
        [5e-324, 0.0],
        [1e16, 1e16 + 2],
    ],
    ids=["one", "constant", "nothing", "nothing finite", "large", "tiny", "close"],
)
@pytest.mark.parametrize("look", [Look(), Look(log=True), Look(by_time=True), Look(by_rank=True, smooth=0.5)], ids=str)
def test_odd_values_are_drawn(values: list[float], look: Look) -> None:
    svg, _, _ = draw(logged(odd={0: values, 1: values, None: values}), look)
    places = [each.get(name, "") for each in svg.iter() for name in ("d", "x", "y", "cx", "cy")]
    assert not [place for place in places if "nan" in place or "inf" in place]


def test_many_points_ranks_and_names_give_a_picture_of_bounded_size() -> None:
    ranks: dict[int | None, Sequence[float]] = {rank: [math.sin(n) for n in range(2000)] for rank in range(64)}
    assert len(draw(logged(loss=ranks))[1]) < 20_000
    assert len(draw(logged(loss=ranks), Look(by_rank=True))[1]) < 150_000
    svg, html, text = draw(logged(**{f"name{n}": {0: [1.0, 2.0]} for n in range(64)}))
    assert len(list(svg.iter(f"{SVG}g"))) == PANELS
    assert "52 more: %mesh watch NAME" in html
    assert len(text.splitlines()) == 65


def test_a_name_is_text_and_no_markup() -> None:
    svg, _, _ = draw(logged(**{"<script>'&\"": {0: [1.0, 2.0]}}))
    assert svg.find(f".//{SVG}script") is None
