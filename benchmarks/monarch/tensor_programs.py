"""Programs with tensors of the ranks' own, as far as Monarch runs them without GPUs. Run by `programs`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

import meshbook
from meshbook import (
    Tensor,
    coalescing,
    fetch_shard,
    get_active_mesh,
    get_active_stream,
    inspect,
    no_mesh,
    remote,
    slice_mesh,
)

PROGRAMS: list[Callable[[Any], Any]] = []


def program(function: Callable[[Any], Any]) -> Callable[[Any], Any]:
    """Have it run within ``procs.activate()``."""

    def run(procs: Any) -> Any:
        with procs.activate():
            return function(procs)

    run.__name__ = f"tensors: {function.__name__}"
    PROGRAMS.append(run)
    return function


def total(x: Any) -> Any:
    return x.sum()


def pair(x: Any) -> Any:
    return {"twice": x * 2, "none": None}


for _name, _function in {
    "an_operation": lambda procs: inspect(torch.ones(3) * 2 + 1),
    "a_product": lambda procs: inspect(torch.ones(2, 3) @ torch.arange(6.0).view(3, 2)),
    "the_index_of_each_rank": lambda procs: [inspect(procs.rank_tensor("gpus") * 10, gpus=rank) for rank in range(4)],
    "a_structure": lambda procs: inspect({"a": torch.ones(2), "b": 3}),
    "a_shard_by_a_mapping": lambda procs: fetch_shard(procs.rank_tensor("gpus"), {"gpus": 3}).get(),
    "a_remote_function": lambda procs: inspect(remote(total, propagate=lambda x: torch.empty(()))(torch.ones(3))),
    "a_remote_function_by_name": lambda procs: inspect(remote("torch.ones", propagate=lambda n: torch.empty(n))(3)),
    "the_mesh_that_is_active": lambda procs: (get_active_mesh() is not None, str(get_active_stream())),
}.items():
    _function.__name__ = _name
    program(_function)


@program
def what_tensors_are(procs: Any) -> Any:
    x = torch.zeros(2, 3, dtype=torch.int64)
    return isinstance(x, Tensor), isinstance(x, torch.Tensor), x.shape, x.dtype


@program
def indices_of_all_axes(procs: Any) -> Any:
    return {name: inspect(tensor, gpus=2) for name, tensor in procs.rank_tensors().items()}


@program
def a_tensor_of_a_part(procs: Any) -> Any:
    part = procs.slice(gpus=2)
    sliced = slice_mesh(procs.rank_tensor("gpus"), gpus=2).to_mesh(part)
    with part.activate():
        return inspect(sliced * 10)


@program
def a_remote_function_of_structures(procs: Any) -> Any:
    made = remote(pair, propagate=lambda x: {"twice": torch.empty(3), "none": None})(torch.ones(3))
    return inspect(made["twice"]), made["none"]


@program
def a_remote_function_by_decoration(procs: Any) -> Any:
    return inspect(remote(propagate=lambda x: torch.empty(()))(total)(torch.ones(3)))


@program
def what_one_rank_returns(procs: Any) -> Any:
    called = remote(total, propagate=lambda x: torch.empty(()))
    return meshbook.call_on_shard_and_fetch(called, torch.ones(3), shard={"gpus": 1}).get()


@program
def no_mesh_that_is_active(procs: Any) -> Any:
    with no_mesh.activate():
        x = torch.ones(2)
        return isinstance(x, Tensor), x


@program
def the_active_mesh_where_there_is_none(procs: Any) -> Any:
    with no_mesh.activate():
        return get_active_mesh() is None


@program
def in_place(procs: Any) -> Any:
    x = torch.zeros(3)
    x.add_(1)
    x[0] = 5
    return inspect(x)


@program
def gradients(procs: Any) -> Any:
    w = torch.ones(2, requires_grad=True)
    torch.autograd.backward([(w * 3).sum()])
    return inspect(w.grad)


@program
def gradients_one_by_one(procs: Any) -> Any:
    w = torch.ones(2, requires_grad=True)
    return [inspect(each) for each in meshbook.grad_generator((w * 3).sum(), [w]) if each is not None]


@program
def operations_together(procs: Any) -> Any:
    with coalescing():
        x = torch.ones(2) + 1
        y = x * 2
    return inspect(y)


@program
def a_stream_of_ones_own(procs: Any) -> Any:
    other = meshbook.Stream("other")
    with other.activate():
        told = str(get_active_stream())
    return told, str(get_active_stream())
