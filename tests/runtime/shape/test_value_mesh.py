from __future__ import annotations

import importlib
import pickle
import re
import sys
import threading

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from meshbook.errors import LayoutError, RankError, UnknownAxisError, UsageError
from meshbook.shape.members import Members, Region
from meshbook.shape.value_mesh import ValueMesh

MESH = Region.of({"hosts": 2, "gpus": 4})


def squares(members: Members = MESH) -> ValueMesh[int]:
    return ValueMesh(members, [rank * rank for rank in members.ranks()])


def test_values_are_found_by_coordinates_and_by_base_rank() -> None:
    values = squares(MESH.slice(hosts=1))
    assert values.item(gpus=2) == values.get(6) == values[6] == 36
    assert values.item(gpus=-1) == 49
    assert (values.sizes, values.ranks, len(values)) == ({"gpus": 4}, (4, 5, 6, 7), 4)
    assert squares(MESH.slice(hosts=1, gpus=1)).item() == 25


def test_it_iterates_as_points_and_values() -> None:
    values = squares()
    assert [(dict(point), value) for point, value in values][:2] == [
        ({"hosts": 0, "gpus": 0}, 0),
        ({"hosts": 0, "gpus": 1}, 1),
    ]
    assert values.items() == list(values)
    assert values.values() == [rank * rank for rank in range(8)]


@given(st.data())
@settings(max_examples=50, deadline=None)
def test_every_view_keeps_each_value_with_its_rank(data: st.DataObject) -> None:
    gpus = data.draw(st.lists(st.integers(0, 3), min_size=1, unique=True))
    view = data.draw(
        st.sampled_from([squares(), squares().slice(hosts=slice(None, None, -1)), squares().slice(gpus=gpus)])
    )
    for values in (
        view,
        view.slice(hosts=0),
        view.slice(gpus=[0]),
        view.rename(hosts="gpus", gpus="hosts"),
        view.split(hosts=("a", "b"), a=2),
        view.flatten("rank"),
    ):
        assert values.values() == [rank * rank for rank in values.ranks]
        assert all(values.get(rank) == rank * rank for rank in values.ranks)
        assert all(values.item(**point) == value for point, value in values)


def test_flatten_works_for_views_that_no_stride_describes() -> None:
    values = squares(MESH.slice(gpus=slice(0, 3))).flatten("rank")
    assert values.sizes == {"rank": 6}
    assert values.item(rank=3) == 16


def test_lazy_values_are_decoded_once_for_all_views_and_threads() -> None:
    decoded: list[int] = []

    def loader(rank: int) -> int:
        decoded.append(rank)
        return rank * 10

    values = ValueMesh.lazy(MESH, loader)
    view = values.slice(hosts=1)
    assert decoded == []
    assert view.get(5) == 50
    threads = [threading.Thread(target=values.values) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert view.values() == [40, 50, 60, 70]
    assert sorted(decoded) == list(range(8))


def test_a_value_that_cannot_be_decoded_hurts_only_who_looks_at_it() -> None:
    def load(rank: int) -> int:
        if rank == 1:
            raise ModuleNotFoundError("no module named plots")
        return rank

    values = ValueMesh.lazy(Region.of({"gpus": 2}), load)
    assert values.get(0) == 0
    for _ in range(2):
        with pytest.raises(ModuleNotFoundError):
            values.get(1)
    assert "<ModuleNotFoundError: no module named plots>" in repr(values)


def test_map_makes_a_mesh_of_results() -> None:
    assert squares().map(lambda value: value + 1).values() == [rank * rank + 1 for rank in range(8)]


def test_equality_compares_ranks_axes_and_all_elements() -> None:
    assert (squares() == squares()) is True
    assert (squares() != squares()) is False
    assert squares() != squares().rename(hosts="dp")
    assert squares(MESH.slice(hosts=0)) != ValueMesh(MESH.slice(hosts=1), [0, 1, 4, 9])
    two = Region.of({"gpus": 2})
    assert ValueMesh(two, [np.arange(3), np.ones(2)]) == ValueMesh(two, [np.arange(3), np.ones(2)])
    assert ValueMesh(two, [np.arange(3), np.ones(2)]) != ValueMesh(two, [np.arange(3), np.ones((2, 1))])
    nested = ValueMesh(MESH, [squares()] * 8)
    assert nested == ValueMesh(MESH, [squares()] * 8)
    assert nested != squares()


def test_several_values_have_no_truth() -> None:
    assert (squares() == 4).values() == [rank == 2 for rank in range(8)]
    with pytest.raises(UsageError, match="no single truth"):
        bool(squares() == 4)
    assert squares(MESH.slice(hosts=0, gpus=2)) == 4


def test_it_survives_pickling() -> None:
    lazy = ValueMesh.lazy(MESH.slice(gpus=[0, 1, 3]), lambda rank: rank)
    assert pickle.loads(pickle.dumps(lazy)) == lazy


def test_the_repr_groups_equal_values_by_ranks() -> None:
    assert repr(ValueMesh(MESH, [0.5, 0.5, 0.5, None, 0.5, {"b": 1, "a": 2}, "x  y", "x  y"])) == (
        "ValueMesh: hosts=2, gpus=4\n  [0-2,4]  0.5\n  [3]      None\n  [5]      {'b': 1, 'a': 2}\n  [6,7]    'x  y'"
    )


@pytest.mark.slow
def test_the_repr_stays_on_one_screen_with_a_thousand_ranks_and_huge_values() -> None:
    mesh = Region.of({"hosts": 125, "gpus": 8})
    matrix = np.ones((30, 30))
    huge = [[list(range(1000))] * 1000, "x" * 1_000_000, dict.fromkeys(range(1000), "y" * 1000), matrix, 10**1000, {}]
    for values in (range(1000), [huge[rank % 6] for rank in range(1000)], [f"{rank}" * 5000 for rank in range(1000)]):
        text = repr(ValueMesh(mesh, values))
        assert len(text.splitlines()) <= 22
        assert max(map(len, text.splitlines())) <= 104
    assert "and 981 more ranks" in repr(ValueMesh(mesh, range(1000)))


def test_values_that_differ_late_are_not_shown_as_equal() -> None:
    text = repr(ValueMesh(Region.of({"gpus": 2}), ["x" * 500 + "0", "x" * 500 + "1"]))
    assert len(text.splitlines()) == 3


def test_wrong_requests_are_shape_errors() -> None:
    with pytest.raises(LayoutError, match="7 values for the 8 members"):
        ValueMesh(MESH, range(7))
    with pytest.raises(RankError):
        squares().get(8)
    with pytest.raises(RankError):
        squares(MESH.slice(hosts=1))[0]
    with pytest.raises(UsageError, match=r"\.item\(hosts=0\)    a part: \.slice\(hosts=slice\(0, 2\)\)"):
        squares()[0:2]  # type: ignore[index]
    with pytest.raises(UnknownAxisError):
        squares().item(gpu=0)
    with pytest.raises(LayoutError, match="hosts is missing"):
        squares().item(gpus=0)


def test_equal_texts_are_pickled_once() -> None:
    many = Region.of({"gpus": 1000})
    text = "x" * 1000
    values = ValueMesh(many, ["".join([text[:500], text[500:]]) for _ in range(1000)])
    pickled = pickle.dumps(values)
    assert len(pickled) < 4000 and pickle.loads(pickled) == values
    mixed: list[object] = [1, True, 1.0, 1, 1, "1", b"1", None, None, [2], [2], float("nan")]
    again = pickle.loads(pickle.dumps(ValueMesh(Region.of({"gpus": len(mixed)}), mixed))).values()
    assert list(map(repr, again)) == list(map(repr, mixed)) and again[9] is not again[10]


def test_operators_act_on_the_value_of_each_rank() -> None:
    values = squares(MESH.slice(hosts=0))
    assert (values + 1).values() == [1, 2, 5, 10]
    assert (10 - values).values() == [10, 9, 6, 1]
    assert (values - values * 2).values() == [0, -1, -4, -9]
    assert (values == 4).values() == [False, False, True, False]
    assert (values != 4).values() == [True, True, False, True]
    assert (values > 1).values() == [False, False, True, True]
    assert (-values).values() == [0, -1, -4, -9]
    assert (values + 1).ranks == values.ranks
    with pytest.raises(LayoutError, match="gpus=4 of ranks 0-3, and gpus=4 of ranks 4-7"):
        values + squares(MESH.slice(hosts=1))


def test_operators_of_numpy_and_torch_leave_the_ranks_apart() -> None:
    values = squares(MESH.slice(hosts=0))
    assert (np.float64(2) * values).values() == [0, 2, 8, 18]
    assert [list(value) for value in (np.ones(2) + values).values()] == [[1, 1], [2, 2], [5, 5], [10, 10]]
    torch = pytest.importorskip("torch")
    assert [value.tolist() for value in (torch.ones(1) + values).values()] == [[1], [2], [5], [10]]


def test_numpy_gets_the_axes_of_the_mesh_and_those_of_the_values() -> None:
    assert np.array(squares()).tolist() == [[0, 1, 4, 9], [16, 25, 36, 49]]
    assert np.mean(squares()) == 17.5  # type: ignore[call-overload]
    assert np.asarray(squares().map(lambda value: [value, 1.0]), "float32").shape == (2, 4, 2)
    ragged = np.asarray(squares(MESH.slice(hosts=0)).map(lambda value: [0] * value))
    assert (ragged.dtype, ragged.shape, ragged[2]) == (object, (4,), [0, 0, 0, 0])


def test_a_frame_has_a_row_per_rank_and_a_column_per_key_of_dicts() -> None:
    polars = pytest.importorskip("polars")
    frame = squares().frame()
    assert isinstance(frame, polars.DataFrame)
    assert frame.columns == ["rank", "hosts", "gpus", "value"]
    assert frame.row(5) == (5, 1, 1, 25)
    assert squares().map(lambda value: {"loss": value, "lr": 0.1}).frame().columns[-2:] == ["loss", "lr"]


def test_a_frame_needs_pandas_or_polars(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("pandas", "polars"):
        monkeypatch.delitem(sys.modules, name, raising=False)
    monkeypatch.setattr(sys, "path", [])
    importlib.invalidate_caches()
    with pytest.raises(UsageError, match="pip install pandas"):
        squares().frame()


def test_html_has_a_grid_for_two_axes_and_one_row_for_equal_values() -> None:
    grid = squares().map(lambda value: "<odd>" if value == 36 else 1)._repr_html_()
    assert "hosts \\ gpus" in grid
    assert grid.count("<tr ") == 3
    assert re.findall(r'warn-color1[^>]*title="(rank \d): [^>]*>([^<]*)<', grid) == [
        ("rank 6", "&#x27;&lt;odd&gt;&#x27;")
    ]
    assert "equal on all 8" in squares().map(lambda _value: 1)._repr_html_()
    one_axis = squares(MESH.slice(hosts=0))._repr_html_()
    assert one_axis.count("<tr ") == 4
    many = ValueMesh(Region.of({"gpus": 64}), range(64))._repr_html_()
    assert many.count("<tr ") == 19
    assert "and 45 more ranks" in many


def test_numbers_of_two_axes_are_tinted_by_their_size_and_odd_ones_marked() -> None:
    tinted = squares().map(lambda value: float("nan") if value == 36 else float(value))._repr_html_()
    grounds = re.findall(r"background:rgba\(239,108,0,([\d.]+)\)[^>]*>([^<]*)<", tinted)
    assert [text for _, text in grounds] == ["1.0", "4.0", "9.0", "16.0", "25.0", "49.0"]
    assert [float(tint) for tint, _ in grounds] == sorted(float(tint) for tint, _ in grounds)
    assert re.findall(r"warn-color1[^>]*>([^<]*)<", tinted) == ["nan"]
    assert "rgba(239" not in squares().map(lambda value: "text" + str(value))._repr_html_()
