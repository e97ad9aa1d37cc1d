"""Arrow data becomes arrays in the same memory, or says which column cannot, whichever library it is of."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch

import meshbook
from meshbook import ProcMesh
from meshbook.errors import UsageError
from meshbook.tensors.data import batches
from meshbook.tensors.data.batches import read_batches, read_values

COLUMNS = {"a": [1, 2, 3, 4, 5], "b": [0.5, 1.5, 2.5, 3.5, 4.5], "c": [True, False, True, True, False]}


def of_pyarrow(columns: dict[str, list[Any]]) -> Any:
    return pytest.importorskip("pyarrow").table(columns)


def of_polars(columns: dict[str, list[Any]]) -> Any:
    return pytest.importorskip("polars").DataFrame(columns)


def of_duckdb(columns: dict[str, list[Any]]) -> Any:
    duckdb = pytest.importorskip("duckdb")
    names = ", ".join(f'unnest({values!r}::{kind}[]) AS "{name}"' for name, values, kind in _typed(columns))
    return duckdb.sql("SELECT " + names.replace("None", "NULL").replace("True", "true").replace("False", "false"))


def _typed(columns: dict[str, list[Any]]) -> list[tuple[str, list[Any], str]]:
    kinds = {bool: "BOOLEAN", int: "BIGINT", float: "DOUBLE", str: "VARCHAR"}
    return [(name, values, kinds[type(values[0])]) for name, values in columns.items()]


def of_nanoarrow(columns: dict[str, list[Any]]) -> Any:
    nanoarrow = pytest.importorskip("nanoarrow")
    kinds = {bool: nanoarrow.bool_(), int: nanoarrow.int64(), float: nanoarrow.float64(), str: nanoarrow.string()}
    struct = nanoarrow.struct({name: kinds[type(values[0])] for name, values in columns.items()})
    arrays = [nanoarrow.c_array(values, kinds[type(values[0])]) for values in columns.values()]
    rows = len(next(iter(columns.values())))
    return nanoarrow.c_array_from_buffers(struct, rows, buffers=[None], children=arrays)


@pytest.fixture(autouse=True, params=["nanoarrow", "pyarrow"])
def reader(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """The library that is installed to read Arrow data."""
    name: str = request.param
    pytest.importorskip(name)
    if name == "pyarrow":
        monkeypatch.setattr(batches, "find_spec", lambda library: None if library == "nanoarrow" else True)
    return name


LIBRARIES = [of_nanoarrow, of_pyarrow, of_polars, of_duckdb]


@pytest.mark.parametrize("make", LIBRARIES)
def test_numbers_arrive(make: Callable[..., Any]) -> None:
    found = read_values(make(COLUMNS))
    assert isinstance(found, dict)
    assert {name: values.tolist() for name, values in found.items()} == COLUMNS
    assert [values.dtype for values in found.values()] == [np.int64, np.float64, np.bool_]


@pytest.mark.parametrize("make", LIBRARIES)
def test_a_column_that_no_tensor_holds_is_named(make: Callable[..., Any]) -> None:
    with pytest.raises(UsageError, match='the column "name" holds text: encode it as numbers, or leave it out'):
        read_values(make({"a": [1, 2], "name": ["x", "y"]}))
    with pytest.raises(UsageError, match='the column "a" has 2 nulls, which a tensor cannot hold: fill them, or drop'):
        read_values(make({"a": [1, None, None, 4]}))


def test_memory_is_shared_and_kept() -> None:
    polars = pytest.importorskip("polars")
    frame = polars.DataFrame({"a": np.arange(1000), "v": np.arange(4000.0).reshape(1000, 4)}).slice(7, 900)
    found = read_values(frame)
    assert isinstance(found, dict)
    assert found["a"].ctypes.data == frame["a"].to_numpy(allow_copy=False).ctypes.data
    assert found["v"].shape == (900, 4)
    assert all(values.flags.writeable for values in found.values())  # torch takes them without a copy
    del frame
    assert found["a"].tolist() == list(range(7, 907))
    assert found["v"][0].tolist() == [28.0, 29.0, 30.0, 31.0]


def test_pyarrow_in_all_its_forms() -> None:
    arrow = pytest.importorskip("pyarrow")
    table = arrow.table({"a": np.arange(6, dtype=np.uint8), "c": [True, False, True, True, False, True]})
    chunked = arrow.concat_tables([table, table.slice(1, 0), table.slice(1, 3)])
    found = read_values(chunked)
    assert isinstance(found, dict)
    assert found["a"].tolist() == [0, 1, 2, 3, 4, 5, 1, 2, 3]
    assert found["c"].tolist() == [True, False, True, True, False, True, False, True, True]
    assert [len(each["a"]) for each in read_batches(chunked.combine_chunks().to_reader(4))] == [4, 4, 1]
    empty = read_values(table.slice(0, 0))
    assert isinstance(empty, dict)
    assert (empty["a"].dtype, len(empty["a"])) == (np.uint8, 0)
    assert read_values(arrow.array([1, 2, 3]).slice(1)).tolist() == [2, 3]  # type: ignore[union-attr]
    lone = read_values(table.to_batches()[0].slice(2))
    assert isinstance(lone, dict)
    assert lone["a"].ctypes.data == table["a"].chunk(0).to_numpy().ctypes.data + 2
    nested = arrow.array([[[1, 2], [3, 4]]], arrow.list_(arrow.list_(arrow.int16(), 2), 2))
    assert read_values(nested).tolist() == [[[1, 2], [3, 4]]]  # type: ignore[union-attr]
    words = {
        "dates or times": arrow.array([1], arrow.timestamp("us")), "categories": arrow.array(["x"]).dictionary_encode(),
        "decimals": arrow.array([1], arrow.decimal128(5, 2)), "lists of any length": arrow.array([[1]]),
        "nothing but nulls": arrow.nulls(3), "structs": arrow.array([{"x": 1}]), "bytes": arrow.array([b"x"]),
    }  # fmt: skip
    for held, column in words.items():
        with pytest.raises(UsageError, match=f'the column "odd" holds {held}'):
            read_values(arrow.table({"odd": column}))
    with pytest.raises(UsageError, match=r"two columns have one name, among \['a', 'b', 'a'\]"):
        read_values(arrow.table([[1], [2], [3]], names=["a", "b", "a"]))
    with pytest.raises(UsageError, match="1 nulls"):
        read_values(arrow.table({"v": arrow.array([[1, 2], None], arrow.list_(arrow.int16(), 2))}))


@pytest.mark.parametrize("make", LIBRARIES)
def test_streams_take_them_as_batches_and_as_sources(mesh4: ProcMesh, make: Callable[..., Any]) -> None:
    data = make(COLUMNS)
    for source in ([data, make({"a": [7]})], data):
        first, *_ = meshbook.stream(source, mesh4, {"b": []} if source is data else None)
        assert first["a"].tolist() == COLUMNS["a"]
        assert first["b"].dtype == torch.float64
        assert first["c"].tolist() == COLUMNS["c"]
        assert ("Shard" in repr(first["b"].placements)) is (source is not data)


def test_a_frame_that_is_lazy_is_refused(mesh4: ProcMesh) -> None:
    polars = pytest.importorskip("polars")
    with pytest.raises(UsageError, match=r"LazyFrame has no rows yet: give what its collect\(\) makes"):
        meshbook.stream(polars.DataFrame({"a": [1]}).lazy(), mesh4)


def test_without_a_library_it_is_said_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    frame = of_polars(COLUMNS)
    monkeypatch.setattr(batches, "find_spec", lambda _: None)
    for read in (read_values, read_batches):
        with pytest.raises(UsageError, match="DataFrame holds Arrow data, and neither nanoarrow nor pyarrow is inst"):
            read(frame)


def test_an_error_of_the_source_is_told() -> None:
    arrow = pytest.importorskip("pyarrow")
    table = arrow.table({"a": [1, 2]})

    def tables() -> Iterator[Any]:
        yield table.to_batches()[0]
        raise ValueError("boom")

    batches = read_batches(arrow.RecordBatchReader.from_batches(table.schema, tables()))
    assert len(next(batches)["a"]) == 2  # type: ignore[call-overload]
    with pytest.raises(UsageError, match=r"(?s)the Arrow data cannot be read: .*boom"):
        next(batches)
