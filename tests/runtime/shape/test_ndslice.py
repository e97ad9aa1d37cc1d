"""Slices, shapes, extents and value meshes as programs for Monarch make and ask them."""

from __future__ import annotations

import pickle

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from meshbook import Extent, NDSlice, Point, Shape, Slice, ValueMesh
from meshbook.errors import LayoutError


@st.composite
def slices(draw: st.DrawFn) -> Slice:
    """Also such as no mesh has: with axes in any order, or that overlap."""
    sizes = draw(st.lists(st.integers(1, 4), max_size=3))
    strides = draw(st.lists(st.integers(0, 13), min_size=len(sizes), max_size=len(sizes), unique=True))
    return Slice(draw(st.integers(0, 5)), sizes, strides)


@given(slices())
@settings(max_examples=200, deadline=None)
def test_a_slice_is_the_sequence_of_its_ranks(ranks: Slice) -> None:
    expected = [ranks.offset]
    for size, stride in zip(ranks.sizes, ranks.strides, strict=True):
        expected = [rank + index * stride for rank in expected for index in range(size)]
    assert list(ranks) == expected == [ranks[index] for index in range(len(ranks))]
    assert (len(ranks), ranks[-1], ranks[1:3]) == (len(expected), expected[-1], tuple(expected[1:3]))
    for rank in range(-1, 60):
        assert (rank in ranks) == (rank in expected)
        if rank in expected:
            assert ranks[ranks.index(rank)] == ranks.nditem(ranks.coordinates(rank)) == rank
        else:
            with pytest.raises(ValueError, match="selects nothing"):
                ranks.index(rank)
    assert pickle.loads(pickle.dumps(ranks)) == ranks
    assert hash(Slice(ranks.offset, ranks.sizes, ranks.strides)) == hash(ranks)


def test_slices_are_made_of_sizes_and_of_ranks() -> None:
    dense = Slice.new_row_major([2, 3])
    assert dense == NDSlice(offset=0, sizes=[2, 3], strides=[3, 1]) != (0, (2, 3), (3, 1))
    assert repr(dense) == "Slice { offset: 0, sizes: [2, 3], strides: [3, 1] }"
    assert (dense.ndim, dense.get_index(4), dense.coordinates(4)) == (2, 4, [1, 1])
    assert [rank for part in Slice.from_list([0, 2, 4, 9]) for rank in part] == [0, 2, 4, 9]
    with pytest.raises(IndexError):
        dense[6]
    with pytest.raises(IndexError):
        dense.nditem([2, 0])
    with pytest.raises(LayoutError, match="as many of each"):
        Slice(0, [2], [])


def test_an_extent_is_a_mapping_with_lists_of_labels_and_sizes() -> None:
    extent = Extent(["hosts", "gpus"], [2, 3])
    assert (extent.labels, extent.sizes, extent.nelements) == (["hosts", "gpus"], [2, 3], 6)
    assert (extent["gpus"], list(extent.keys()), len(extent), dict(extent)) == (
        3, ["hosts", "gpus"], 2, {"hosts": 2, "gpus": 3},
    )  # fmt: skip
    assert extent == Extent(labels=("hosts", "gpus"), sizes=(2, 3)) == pickle.loads(pickle.dumps(extent))
    assert extent != Extent(["gpus", "hosts"], [3, 2])
    assert len({extent, Extent(["hosts", "gpus"], [2, 3])}) == 1
    with pytest.raises(ValueError, match='unknown axis "gpu"'):
        extent["gpu"]
    region = extent.region
    assert (region.labels, region.slice(), region.as_shape().ranks()) == (
        ["hosts", "gpus"], Slice.new_row_major([2, 3]), list(range(6)),
    )  # fmt: skip
    assert region.point_of_base_rank(4) == {"hosts": 1, "gpus": 1}
    assert str(extent.point(4)) == "{'hosts': 1/2, 'gpus': 1/3}"


def test_shapes_are_cut_along_named_axes() -> None:
    shape = Shape(["batch", "height", "width"], Slice(offset=0, sizes=[2, 3, 4], strides=[12, 4, 1]))
    assert (shape.at("height", 2).labels, shape.at("height", 2).ndslice) == (
        ["batch", "width"], Slice(8, [2, 4], [12, 1]),
    )  # fmt: skip
    assert shape.select("width", slice(0, 4, 2)).ndslice == Slice(0, [2, 3, 2], [12, 4, 2])
    assert shape.index(batch=1, width=0).ranks() == [12, 16, 20]
    assert (shape.coordinates(17), len(shape)) == ({"batch": 1, "height": 1, "width": 1}, 24)
    assert shape == pickle.loads(pickle.dumps(shape)) != shape.region
    assert (Shape.unity().ranks(), Shape.unity().labels) == ([0], [])
    for call in (lambda: shape.at("depth", 0), lambda: shape.at("batch", 5), lambda: shape.coordinates(99)):
        with pytest.raises(ValueError):
            call()


def test_value_meshes_are_made_of_shapes() -> None:
    shape = Shape(["x", "y"], Slice(offset=0, sizes=[2, 3], strides=[3, 1]))
    values = ValueMesh(shape, list("abcdef"))
    assert (values.item(x=1, y=1), values.slice(x=1, y=2).item(), values.extent["y"]) == ("e", "f", 3)
    assert values.shape == shape
    assert values.split(y=("a", "b"), b=3).shape.labels == ["x", "a", "b"]
    one_axis = Shape(["n"], Slice.new_row_major([3]))
    assert ValueMesh.from_indexed(one_axis, [(2, "c"), (0, "z"), (1, "b"), (0, "a")]).values() == ["a", "b", "c"]
    with pytest.raises(ValueError, match=r"no values for the positions \[1\]"):
        ValueMesh.from_indexed(one_axis, [(0, "a"), (2, "c")])
    with pytest.raises(ValueError, match="position=3"):
        ValueMesh.from_indexed(one_axis, [(3, "d")])
    for error in (ValueError, IndexError):
        with pytest.raises(error, match="rank=6"):
            values.get(6)
    with pytest.raises(ValueError, match="5 values"):
        ValueMesh(shape, list("abcde"))


def test_they_print_as_monarchs_do() -> None:
    shape = Shape(["x", "y"], Slice.new_row_major([2, 3]))
    assert repr(shape) == 'Shape { labels: ["x", "y"], slice: Slice { offset: 0, sizes: [2, 3], strides: [3, 1] } }'
    assert str(shape) == "{x=2,y=3}" and repr(shape.region).startswith('Region { labels: ["x", "y"], slice: ')
    assert repr(shape.extent) == "{x: 2, y: 3}" and repr(Shape.unity().extent) == "{}"


def test_what_cannot_be_is_refused_where_it_is_made() -> None:
    with pytest.raises(ValueError, match="two axes have the same stride"):
        Slice(offset=0, sizes=[2, 2], strides=[1, 1])
    assert list(Slice(offset=0, sizes=[1, 2], strides=[1, 1])) == [0, 1]
    for rank in (-1, 6):
        with pytest.raises(ValueError, match=f"rank={rank} "):
            Point(rank, Extent(["x", "y"], [2, 3]))


def test_positions_of_a_shape_are_counted_from_its_start() -> None:
    shape = Shape(["h", "g"], Slice.new_row_major([2, 3]))
    assert Slice(1, [2, 2], [4, 2]).get(3) == 7
    for ask in (lambda: shape.at("h", -1), lambda: shape.index(g=-1), lambda: shape.ndslice.get(-1)):
        with pytest.raises(OverflowError, match="-1 is below 0"):
            ask()
    with pytest.raises(ValueError, match="selects nothing"):
        shape.ndslice.get(6)
