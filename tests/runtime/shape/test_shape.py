"""The shape algebra, held against NumPy indexing of an array of ranks."""

from __future__ import annotations

import copy
import pickle
from itertools import product
from typing import Any

import msgspec
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from meshbook.errors import LayoutError, RankError, ShapeError, UnknownAxisError, UsageError
from meshbook.shape.members import Extent, Members, Picked, Piece, Point, Region, arrange

NAMES = ("hosts", "gpus", "dp", "tp")

quick = settings(max_examples=150, deadline=None)


def ranks_array(members: Members) -> np.ndarray[Any, Any]:
    return np.array(list(members.ranks())).reshape(members.extent.shape)


def same(members: Members, expected: np.ndarray[Any, Any]) -> bool:
    """Whether every way to ask ``members`` for its ranks gives those of ``expected``."""
    assert members.extent.shape == expected.shape
    assert len(members) == members.size() == expected.size
    order = [int(rank) for rank in expected.flat]
    assert list(members.ranks()) == order
    assert [rank for part in members.encoded for rank in part.ranks()] == order
    assert sum(part.total for part in members.encoded) == len(order)
    universe = range(-2, 2 * max(order) + 3)
    assert [rank for rank in universe if members.has(rank)] == sorted(order)
    assert [rank for rank in universe if any(part.has(rank) for part in members.encoded)] == sorted(order)
    for index, rank in enumerate(order):
        point = members.point(rank)
        assert point.rank == index
        assert int(expected[tuple(point.values())]) == rank == members.rank_at(**point)
    return True


@st.composite
def bases(draw: st.DrawFn, axes: int = 1) -> Region:
    shape = draw(st.lists(st.integers(1, 5), min_size=axes, max_size=3))
    return Region.of(dict(zip(NAMES, shape, strict=False)))


@st.composite
def indices(draw: st.DrawFn, size: int) -> int | slice:
    bound = st.none() | st.integers(-size - 1, size + 1)
    step = st.none() | st.integers(-3, 3).filter(bool)
    return draw(st.integers(-size, size - 1) | st.builds(slice, bound, bound, step))


@st.composite
def slicings(draw: st.DrawFn, members: Members) -> dict[str, int | slice]:
    labels = draw(st.lists(st.sampled_from(members.labels), unique=True)) if members.labels else []
    return {label: draw(indices(members.size(label))) for label in labels}


@st.composite
def views(draw: st.DrawFn) -> Members:
    """Views of views, affine or not, of a small mesh."""
    members: Members = draw(bases())
    for _ in range(draw(st.integers(0, 2))):
        axes: dict[str, Any] = {}
        for label, size in members.sizes.items():
            lists = st.lists(st.integers(0, size - 1), unique=True, min_size=1)
            axes[label] = draw(st.just(slice(None)) | lists | indices(size))
        try:
            members = members.slice(**axes)
        except RankError:
            continue
    return members


@pytest.mark.slow
@given(st.data())
@quick
def test_slice_is_numpy_indexing(data: st.DataObject) -> None:
    members = data.draw(views())
    axes = data.draw(slicings(members))
    expected = ranks_array(members)[tuple(axes.get(label, slice(None)) for label in members.labels)]
    if expected.size:
        assert same(members.slice(**axes), expected)
    else:
        with pytest.raises(RankError):
            members.slice(**axes)


@pytest.mark.slow
@given(st.data())
@quick
def test_lists_are_numpy_indexing_axis_by_axis(data: st.DataObject) -> None:
    members = data.draw(views())
    axes: dict[str, Any] = {}
    expected = ranks_array(members)
    for axis, (label, size) in reversed(list(enumerate(members.sizes.items()))):
        chosen = data.draw(st.lists(st.integers(-size, size - 1), min_size=1, unique_by=lambda i, n=size: i % n))
        axes[label] = chosen if data.draw(st.booleans()) else chosen[0]
        expected = np.take(expected, axes[label], axis=axis)
    assert same(members.slice(**axes), expected)


@pytest.mark.slow
@given(st.data())
@quick
def test_split_is_reshape_and_flatten_undoes_it(data: st.DataObject) -> None:
    members = data.draw(views().filter(lambda members: members.labels))
    label = data.draw(st.sampled_from(members.labels))
    size = members.size(label)
    first = data.draw(st.sampled_from([n for n in range(1, size + 1) if size % n == 0]))
    given_sizes = data.draw(st.sampled_from([{"a": first}, {"b": size // first}, {"a": first, "b": size // first}]))
    axis = members.labels.index(label)
    array = ranks_array(members)
    split = members.split(**{label: ("a", "b")}, **given_sizes)
    assert split.labels == (*members.labels[:axis], "a", "b", *members.labels[axis + 1 :])
    assert same(split, array.reshape(*array.shape[:axis], first, size // first, *array.shape[axis + 1 :]))
    rest = {name: 0 for name in members.labels if name != label}
    part, ranks = split.slice(**rest), list(members.slice(**rest).ranks())
    assert list(part.ranks()) == ranks
    if isinstance(part, Picked) or len(set(np.diff(ranks).tolist())) <= 1:  # else it is one of the next test's
        assert list(part.flatten(label).ranks()) == ranks


@pytest.mark.slow
@given(views())
@quick
def test_flatten_works_exactly_where_one_stride_describes_the_ranks(members: Members) -> None:
    flat = ranks_array(members).reshape(-1)
    evenly_spaced = len(set(np.diff(flat).tolist())) <= 1
    if evenly_spaced or isinstance(members, Picked):
        assert same(members.flatten("rank"), flat)
        assert members.flatten("rank").labels == ("rank",)
    else:
        with pytest.raises(LayoutError, match="cannot be flattened"):
            members.flatten("rank")


@pytest.mark.slow
@given(st.data())
@quick
def test_select_keeps_the_order_given(data: st.DataObject) -> None:
    members = data.draw(views())
    ranks = data.draw(st.lists(st.sampled_from(list(members.ranks())), min_size=1, unique=True))
    assert same(members.select(ranks), np.array(ranks))


@given(views())
@quick
def test_views_survive_pickling_and_copying(members: Members) -> None:
    for twin in (pickle.loads(pickle.dumps(members)), copy.deepcopy(members)):
        assert twin == members
        assert twin.extent == members.extent
    assert arrange(members.extent, list(members.ranks())) == members


@given(bases(axes=0))
@quick
def test_rank_and_point_are_inverse(members: Region) -> None:
    extent = members.extent
    assert [extent.rank(point) for point in extent.points()] == list(range(extent.nelements))
    expected = [dict(zip(extent.names, index, strict=True)) for index in product(*map(range, extent.shape))]
    assert [dict(point) for point in extent.points()] == expected


@given(st.lists(st.integers(0, 60), unique=True))
@quick
def test_group_keeps_order_and_members(ranks: list[int]) -> None:
    parts = Picked(Extent(("rank",), (len(ranks),)), tuple(ranks)).encoded if ranks else ()
    assert [rank for part in parts for rank in part.ranks()] == ranks
    assert all(part.is_nested() for part in parts)


def test_encoding_of_ten_thousand_ranks_is_a_few_bytes() -> None:
    mesh = Region.of({"hosts": 1250, "gpus": 8})
    for view in (
        mesh,
        mesh.slice(hosts=slice(0, None, 2)),
        mesh.slice(gpus=slice(1, 5)).split(hosts=("a", "b"), b=5),
    ):
        assert len(msgspec.msgpack.encode(view.encoded)) < 40
    assert len(mesh.slice(hosts=[*range(600), *range(700, 1250)], gpus=slice(0, 4)).encoded) == 2
    assert len(mesh.slice(hosts=[7, 3, 1], gpus=slice(None)).encoded) == 2


def test_an_affine_list_is_a_region() -> None:
    mesh = Region.of({"hosts": 2, "gpus": 4})
    assert mesh.slice(gpus=[0, 2]) == mesh.slice(gpus=slice(0, None, 2))
    assert isinstance(mesh.slice(gpus=[3, 1]), Region)
    assert isinstance(mesh.slice(gpus=[0, 1, 3]), Picked)
    assert isinstance(mesh.slice(gpus=[0, 1, 3]).slice(gpus=slice(0, 2)), Region)


def test_axes_swap_names_at_once() -> None:
    mesh = Region.of({"hosts": 2, "gpus": 4}).rename(hosts="gpus", gpus="hosts")
    assert mesh.sizes == {"gpus": 2, "hosts": 4}
    assert list(mesh.ranks()) == list(range(8))


def test_sizes_of_some_axes_multiply() -> None:
    mesh = Region.of({"hosts": 2, "gpus": 4, "tp": 3})
    assert (mesh.size(), mesh.size("gpus"), mesh.size(["hosts", "tp"]), mesh.size([])) == (24, 4, 6, 1)


def test_a_point_is_a_mapping_that_knows_its_extent() -> None:
    point = Region.of({"hosts": 2, "gpus": 4}).point(6)
    assert point == {"hosts": 1, "gpus": 2}
    assert {**point} == {"hosts": 1, "gpus": 2}
    assert (point.rank, point.size("gpus"), "tp" in point, point.get("tp")) == (6, 4, False, None)
    assert point != Region.of({"hosts": 3, "gpus": 4}).point(6)
    assert point in {pickle.loads(pickle.dumps(point))}
    assert repr(point) == "{'hosts': 1/2, 'gpus': 2/4}"
    with pytest.raises(UnknownAxisError, match='Did you mean "gpus"'):
        point["gpu"]


def test_a_mesh_without_axes_has_one_member() -> None:
    one = Region.of({"hosts": 2, "gpus": 4}).slice(hosts=1, gpus=2)
    assert (list(one.ranks()), len(one), one.sizes, one.rank_at()) == ([6], 1, {}, 6)
    assert list(one.flatten("rank").ranks()) == [6]


MESH = Region.of({"hosts": 2, "gpus": 4})
ODD = MESH.slice(gpus=[0, 1, 3])


@pytest.mark.parametrize("mesh", [MESH, ODD])
@pytest.mark.parametrize(
    ("ask", "error", "text"),
    [
        (lambda m: m.slice(gpu=0), UnknownAxisError, 'unknown axis "gpu"; .* Did you mean "gpus"'),
        (lambda m: m.split(gpu=("a", "b"), a=1), UnknownAxisError, "unknown axis"),
        (lambda m: m.rename(gpu="tp"), UnknownAxisError, "unknown axis"),
        (lambda m: m.size("tp"), UnknownAxisError, "hosts=2, gpus=[34]"),
        (lambda m: m.slice(gpus=4), RankError, "gpus=4 selects nothing; gpus runs from 0 to [23]"),
        (lambda m: m.slice(gpus=-5), RankError, "gpus=-5 selects nothing"),
        (
            lambda m: m.slice(gpus=slice(4, 9)),
            RankError,
            "gpus=4:9 selects nothing; gpus runs from 0 to [23]",
        ),
        (
            lambda m: m.slice(gpus=slice(2, None, -1), hosts=slice(1, 1)),
            RankError,
            "hosts=1:1 selects nothing",
        ),
        (lambda m: m.slice(gpus=[0, 4]), RankError, "gpus=4 selects nothing"),
        (lambda m: m.slice(gpus=[]), RankError, r"gpus=\[\] selects nothing"),
        (lambda m: m.slice(gpus=[1, -1, 1]), LayoutError, "gpus 1 is chosen twice"),
        (lambda m: m.slice(gpus=[slice(0, 1)]), UsageError, "holds a slice"),
        (lambda m: m.slice(gpus="0"), UsageError, "gpus='0' is no index"),
        (lambda m: m.slice(gpus=slice(0, 2, 0)), UsageError, "gpus=0:2:0 is no slice"),
        (lambda m: m.slice(gpus=slice("a", 2)), UsageError, "gpus=a:2 is no slice"),
        (lambda m: m.select([99]), RankError, "rank=99 selects nothing; the ranks here are 0"),
        (lambda m: m.select([]), RankError, "selects nothing"),
        (lambda m: m.select([1, 0, 1]), LayoutError, "rank 1 is chosen twice"),
        (lambda m: m.point(8), RankError, "rank=8 selects nothing"),
        (lambda m: m.rank_at(hosts=1), LayoutError, "gpus is missing"),
        (lambda m: m.rank_at(hosts=1, gpus=0, tp=0), UnknownAxisError, "unknown axis"),
        (lambda m: m.rank_at(hosts=1, gpus=4), RankError, "gpus=4"),
        (
            lambda m: m.split(hosts=("a", "b")),
            LayoutError,
            "hosts=2 cannot be split into a x b: give all sizes but one",
        ),
        (lambda m: m.split(hosts=("a", "b"), b=4), LayoutError, "2 is not a multiple of 4"),
        (lambda m: m.split(hosts=("a", "b"), a=1, b=1), LayoutError, "the sizes make 1, not 2"),
        (lambda m: m.split(hosts=("a", "b"), b=0), LayoutError, "size 0; a size is at least 1"),
        (lambda m: m.split(hosts=("a", "b"), c=1), LayoutError, 'a size is given for "c"'),
        (lambda m: m.split(hosts=("a", "gpus"), a=1), LayoutError, 'two axes would be named "gpus"'),
        (lambda m: m.split(hosts="dp,tp", tp=1), UsageError, "neither a size nor a list of names"),
        (lambda m: m.rename(hosts="gpus"), LayoutError, 'two axes would be named "gpus"'),
        (lambda m: m.rename(hosts="d p"), LayoutError, "'d p' cannot name an axis"),
        (lambda m: m.rename(hosts="for"), LayoutError, "'for' cannot name an axis"),
        (lambda m: m.flatten("0"), LayoutError, "'0' cannot name an axis"),
    ],
)
def test_a_wrong_request_says_what_would_be_right(mesh: Members, ask: Any, error: type, text: str) -> None:
    with pytest.raises(error, match=text) as caught:
        ask(mesh)
    assert str(pickle.loads(pickle.dumps(caught.value))) == str(caught.value)
    assert len(str(caught.value)) < 300


def test_flatten_of_what_is_not_dense_gives_the_numbers() -> None:
    with pytest.raises(LayoutError) as caught:
        MESH.slice(gpus=slice(0, 3)).flatten("rank")
    assert str(caught.value) == (
        'hosts=2, gpus=3 cannot be flattened into "rank": a step along hosts moves 4 ranks, but gpus=3 takes '
        "up 3. Its ranks are 0-2,4-6; select them by number to have them on one axis."
    )


def test_messages_about_large_views_stay_short() -> None:
    with pytest.raises(RankError) as caught:
        Region.of({"hosts": 1250, "gpus": 8}).slice(gpus=slice(0, None, 2)).point(1)
    assert str(caught.value).endswith(",...")
    assert len(str(caught.value)) < 150


@pytest.mark.parametrize(
    ("make", "text"),
    [
        (lambda: Extent(("a", "a"), (1, 1)), 'two axes would be named "a"'),
        (lambda: Extent(("a",), (0,)), 'axis "a" has size 0'),
        (lambda: Extent(("a",), (1, 2)), "do not fit"),
        (lambda: Extent(("class",), (1,)), "cannot name an axis"),
        (lambda: Region(("a", "b"), Piece(0, (2, 2), (1, 1))), "axes overlap"),
        (lambda: Region(("a",), Piece(0, (2,), (-1,))), "axes overlap"),
    ],
)
def test_impossible_shapes_are_refused(make: Any, text: str) -> None:
    with pytest.raises(ShapeError, match=text):
        make()


def test_extents_index_points_strictly() -> None:
    extent = Extent(("hosts", "gpus"), (2, 4))
    assert extent.rank({"gpus": 1, "hosts": 1}) == 5
    assert extent.point(5) == Point(5, extent)
    assert repr(extent) == "{hosts: 2, gpus: 4}"
    for wrong in (
        {"gpus": 4, "hosts": 0},
        {"gpus": -1, "hosts": 0},
        {"gpus": 0},
        {"gpus": 0, "hosts": 0, "tp": 0},
    ):
        with pytest.raises(ShapeError):
            extent.rank(wrong)
    with pytest.raises(RankError):
        extent.point(8)
