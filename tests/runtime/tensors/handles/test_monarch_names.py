"""Monarch's names at the top of `meshbook`: ``import meshbook as monarch``."""

from __future__ import annotations

import pytest
import torch

import meshbook as monarch
from meshbook import ProcMesh
from meshbook.errors import UsageError


def test_the_mesh_that_is_active_is_told_and_can_be_left(square: ProcMesh) -> None:
    with pytest.raises(UsageError, match="no device mesh is active"):
        monarch.get_active_mesh()
    with square.activate():
        assert monarch.get_active_mesh().sizes == square.sizes
        with monarch.no_mesh.activate():
            assert type(torch.ones(2)) is torch.Tensor
            with pytest.raises(ValueError, match="no device mesh is active"):
                monarch.get_active_mesh()
        assert isinstance(torch.ones(2), monarch.Tensor)
    assert type(torch.ones(2)) is torch.Tensor


def test_structures_of_tensors_are_reduced_sliced_moved_and_fetched(square: ProcMesh) -> None:
    across, down = square.sizes
    with square.activate():
        index = square.rank_tensor((across, down))
        pair = {"a": index, "b": [index + 10, "text"]}
    total = monarch.reduce(pair, (across, down), "sum")
    assert monarch.inspect(total) == {"a": torch.tensor(6), "b": [torch.tensor(46), "text"]}
    last = dict.fromkeys(square.sizes, 1)
    assert monarch.fetch_shard(pair, last).get(20)["b"][0] == 13 == monarch.inspect(index, **last) + 10
    first = monarch.slice_mesh(pair, **{across: 0})
    everywhere = monarch.to_mesh(first, square, monarch.Stream("other"))
    assert monarch.inspect(everywhere["a"], **last) == 1
    assert monarch.to_mesh(index, square) is index
    moved = monarch.reduce(first, down, "max", mesh=square)
    assert monarch.inspect(moved["b"][0], **last) == 11
    assert monarch.inspect(monarch.reduce_(index * 1, down, "sum"), **last) == 5
    with pytest.raises(UsageError, match="give mesh tensors"):
        monarch.reduce([1, 2], across)
    with pytest.raises(UsageError, match="no mesh tensor to fetch"):
        monarch.inspect([1, 2])


def test_remote_functions_are_named_decorated_and_run_on_the_active_mesh(square: ProcMesh) -> None:
    add = monarch.remote("torch.add", propagate=lambda a, b: torch.empty_like(a))
    ones = monarch.remote("torch.ones")
    with square.activate():
        two = add(ones(3), ones(3))
        assert monarch.inspect(two).tolist() == [2.0] * 3

    @monarch.remote(propagate="mocked")
    def double(x: torch.Tensor) -> torch.Tensor:
        return x * 2

    assert monarch.inspect(double(two)).tolist() == [4.0] * 3
    with pytest.raises(UsageError, match="either says on what mesh it runs"):
        ones(3)
    with pytest.raises(UsageError, match=r'"torch\.no_such" names no function'):
        monarch.remote("torch.no_such")
    with pytest.raises(UsageError, match='"nothing" names no function'):
        monarch.remote("nothing")


def test_what_a_function_returns_on_one_rank_is_fetched(square: ProcMesh) -> None:
    across, down = square.sizes

    def total(x: torch.Tensor, more: int) -> tuple[int, int]:
        return int(x.sum()), more

    with square.activate():
        index = square.rank_tensor((across, down)) + torch.zeros(2, dtype=torch.int64)
        assert monarch.call_on_shard_and_fetch(monarch.remote(total), index, 7).get(20) == (0, 7)
        last = dict.fromkeys(square.sizes, 1)
        assert monarch.call_on_shard_and_fetch(total, index, more=7, shard=last).get(20) == (6, 7)
        rank = monarch.call_on_shard_and_fetch(monarch.remote("torch.distributed.get_rank"), shard={down: 1})
        assert rank.get(20) == 1


def test_streams_are_names_and_what_they_borrow_is_the_tensor(square: ProcMesh) -> None:
    assert repr(monarch.get_active_stream()) == "<Stream('main')>"
    other = monarch.Stream("other")
    with square.activate(), monarch.coalescing():
        x = torch.ones(2)
        with other.activate():
            assert monarch.get_active_stream() is other
            borrowed, borrow = other.borrow(x, mutable=True)
            with borrow:
                borrowed.add_(1)
        borrow.drop()
    assert monarch.inspect(x).tolist() == [2.0, 2.0] and monarch.get_active_stream().name == "main"


def test_gradients_one_after_the_other_and_operations_of_ones_own(square: ProcMesh) -> None:
    def scaled(x: torch.Tensor, by: torch.Tensor) -> object:
        return x * by, lambda gradient: (gradient * by, (gradient * x).sum())

    with square.activate():
        x, by = torch.full((3,), 2.0, requires_grad=True), torch.tensor(5.0, requires_grad=True)
        loss = monarch.grad_function(scaled)(x, by).sum()
        first, second = monarch.grad_generator(loss, [x, by])
        assert first is not None and second is not None
        assert monarch.inspect(first).tolist() == [5.0] * 3 and monarch.inspect(second) == 6


def test_a_tensor_is_shown(square: ProcMesh, capsys: pytest.CaptureFixture[str]) -> None:
    with square.activate():
        monarch.show(torch.ones(2))
    assert capsys.readouterr().out == "tensor([1., 1.])\n"


def test_settings_are_at_the_top_too() -> None:
    with monarch.configured(host_spawn_ready_timeout="90s") as settings:
        assert settings["host_spawn_ready_timeout"] == "90s" == monarch.get_global_config()["host_spawn_ready_timeout"]
        assert monarch.get_runtime_config() == {"host_spawn_ready_timeout": "90s"}
