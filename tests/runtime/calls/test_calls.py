"""Calls on a real mesh: code, functions, values, errors."""

from __future__ import annotations

import asyncio
import concurrent.futures
import threading
import warnings

import numpy as np
import pytest
import torch
from patience import wait_until

from meshbook import ProcMesh, ValueMesh, errors
from meshbook.mesh.rank_calls import set_axes


def test_a_cell_runs_on_every_rank_and_gives_its_last_expression(mesh4: ProcMesh) -> None:
    values = mesh4.run("x = rank * 10\nx").get(30)
    assert isinstance(values, ValueMesh)
    assert values.values() == [0, 10, 20, 30]
    assert values.item(gpus=2) == 20


def test_a_slice_runs_on_its_members_only(mesh4: ProcMesh) -> None:
    mesh4.run("seen = False").get(30)
    mesh4.slice(gpus=slice(1, 3)).run("seen = True").get(30)
    assert mesh4.pull("seen").get(30).values() == [False, True, True, False]


def test_a_function_of_main_travels_in_its_newest_definition(mesh4: ProcMesh) -> None:
    namespace: dict[str, object] = {"__name__": "__main__"}
    for result in (1, 2):
        exec(f"def f(y): return {result} + y", namespace)
        assert mesh4.execute(namespace["f"], 10).get(30).values() == [result + 10] * 4  # type: ignore[arg-type]


def test_a_large_tensor_is_shared_and_written_by_one_rank_alone(mesh4: ProcMesh) -> None:
    big = torch.arange(1_000_000, dtype=torch.float32)
    mesh4.push({"big": big}).get(30)
    mesh4.slice(gpus=1).run("big[0] = 42.0").get(30)
    assert mesh4.evaluate("big[0].item()").get(30).values() == [0.0, 42.0, 0.0, 0.0]
    back = mesh4.pull("big").get(30)
    assert torch.equal(back.item(gpus=0), big)
    assert back.item(gpus=1)[0] == 42.0
    back.item(gpus=2)[0] = 7.0  # ours to write, and nobody else's
    assert mesh4.evaluate("big[0].item()").get(30).item(gpus=2) == 0.0


def test_scatter_cuts_and_gather_joins(mesh4: ProcMesh) -> None:
    whole = torch.arange(10)
    mesh4.scatter("part", whole, "gpus").get(30)
    assert [len(p) for p in mesh4.pull("part").get(30).values()] == [3, 3, 2, 2]
    assert torch.equal(mesh4.gather("part").get(30), whole)


@pytest.mark.quick("torch.full((1_000_001,), rank, dtype=torch.bfloat16)")
@pytest.mark.parametrize(
    "value",
    [
        "numpy.full((700_001, 2), rank, numpy.uint8)",
        "numpy.full((4096, 1024), rank, 'f4')",
        "torch.full((1_000_001,), rank, dtype=torch.bfloat16)",
        "torch.full((1001, 1001), rank, dtype=torch.float64)[rank:]",
        "torch.full((1000, 1001), float(rank), requires_grad=True)",
        "torch.full((1000, 1001), rank).T",
        "torch.full((1 if rank else 1_000_000, 3), rank)",
    ],
)
def test_large_values_are_gathered_as_pulled_ones_are_joined(mesh4: ProcMesh, value: str) -> None:
    mesh4.run(f"import numpy, torch\nlarge = {value}").get(30)
    pieces = mesh4.pull("large").get(30).values()
    for dim in (0, 1) if pieces[0].ndim == 2 and len({len(piece) for piece in pieces}) == 1 else (0,):
        joined = mesh4.gather("large", dim=dim).get(30)
        expected = torch.cat(pieces, dim) if torch.is_tensor(joined) else np.concatenate(pieces, dim)
        assert type(joined) is type(expected) and joined.dtype == expected.dtype and joined.shape == expected.shape
        assert bool((joined == expected).all())
        if not getattr(joined, "requires_grad", False):
            joined[:] = 9
    assert mesh4.evaluate("float(large.max())").get(30).values() == [0.0, 1.0, 2.0, 3.0]


def test_scatter_along_one_of_two_axes_repeats_along_the_other(mesh4: ProcMesh) -> None:
    grid = mesh4.split(gpus=("dp", "tp"), tp=2)
    grid.scatter("piece", ["a", "b"], "dp").get(30)
    assert mesh4.pull("piece").get(30).values() == [["a"], ["a"], ["b"], ["b"]]


def test_broadcast_moves_a_tensor_between_ranks(mesh4: ProcMesh) -> None:
    mesh4.run("w = torch.full((3,), float(rank))").get(30)
    mesh4.broadcast("w", src=2).get(30)
    assert [w.tolist() for w in mesh4.pull("w").get(30).values()] == [[2.0] * 3] * 4


def test_names_on_the_ranks(mesh4: ProcMesh) -> None:
    code = (
        "import os\n(rank, local_rank, world_size, point['gpus'], str(device), mesh.mesh_dim_names, os.environ['RANK'])"
    )
    values = mesh4.run(code).get(30).values()
    assert values == [(r, r, 4, r, "cpu", ("gpus",), str(r)) for r in range(4)]


def test_axes_follow_a_split(mesh4: ProcMesh) -> None:
    grid = mesh4.split(gpus=("dp", "tp"), tp=2)
    set_axes(grid).get(30)
    values = grid.run("(dict(point), mesh.mesh_dim_names, list(mesh.get_coordinate()))").get(30)
    assert values.item(dp=1, tp=0) == ({"dp": 1, "tp": 0}, ("dp", "tp"), [1, 0])
    set_axes(mesh4).get(30)


def test_a_failing_rank_is_named_and_the_others_results_are_kept(mesh4: ProcMesh) -> None:
    with pytest.raises(errors.CallFailed) as caught:
        mesh4.run("1 / 0 if rank % 2 else rank").get(30)
    assert caught.value.ranks == (1, 3)
    assert dict(caught.value.partial) == {0: 0, 2: 2}
    assert str(caught.value).startswith("ranks 1,3 raised ZeroDivisionError: division by zero")
    assert isinstance(caught.value.failures[0].load(), ZeroDivisionError)


def test_a_name_that_no_rank_has(mesh4: ProcMesh) -> None:
    mesh4.run("weights = 1").get(30)
    with pytest.raises(errors.CallFailed, match='Did you mean "weights"'):
        mesh4.pull("wieghts").get(30)


def test_a_value_that_cannot_travel_names_its_path(mesh4: ProcMesh) -> None:
    with pytest.raises(errors.SerializationError, match="lock"):
        mesh4.push({"config": {"lock": threading.Lock()}})
    mesh4.run("import threading; lock = threading.Lock()").get(30)
    with pytest.raises(errors.CallFailed, match="lock"):
        mesh4.pull("lock").get(30)


def test_a_large_result_stays_on_its_rank(mesh4: ProcMesh) -> None:
    value = mesh4.run("torch.zeros(1_000_000)").get(30).item(gpus=3)
    assert "kept on rank 3" in repr(value)


def test_a_timeout_names_the_silent_ranks(mesh4: ProcMesh) -> None:
    future = mesh4.run("import time\nif rank > 1: time.sleep(1.5)")
    with pytest.raises(errors.CallTimeout, match="ranks 2,3 within"):
        future.get(0.5)
    future.get(30)


def test_calls_keep_their_order(mesh4: ProcMesh) -> None:
    mesh4.push({"log": []}).get(30)
    for number in range(50):
        mesh4.execute(_append, number)
    assert mesh4.pull("log").get(30).values() == [list(range(50))] * 4


def _append(number: int) -> None:
    import __main__

    __main__.log.append(number)


def test_a_future_can_be_awaited_in_a_running_loop(mesh4: ProcMesh) -> None:
    async def body() -> list[int]:
        return (await mesh4.run("rank")).values() + mesh4.run("rank").get(30).values()

    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert asyncio.run(body()) == [0, 1, 2, 3] * 2


def test_a_future_can_be_waited_for_beside_those_of_the_standard_library(mesh4: ProcMesh) -> None:
    asked = [mesh4.run("rank"), mesh4.execute(abs, -1), mesh4.run("1 / 0")]
    done, left = concurrent.futures.wait([future.as_concurrent() for future in asked], timeout=30)
    assert len(done) == 3 and not left
    failed = [each.exception() for each in done if each.exception() is not None]
    assert [type(error) for error in failed] == [errors.CallFailed]


def test_ranks_have_random_states_of_their_own(mesh4: ProcMesh) -> None:
    code = "import random, numpy\n(torch.rand(1).item(), random.random(), numpy.random.rand())"
    values = mesh4.run(code).get(30).values()
    assert all(len({value[i] for value in values}) == 4 for i in range(3))


def test_shared_memory_comes_back_to_the_pool(mesh4: ProcMesh) -> None:
    big = torch.ones(1 << 20)
    pool = mesh4._controller._dispatcher.payloads._pool
    for _ in range(20):
        mesh4.push({"shared": big}).get(30)
    wait_until(lambda: len(pool.in_use) <= 2)
    assert len(pool.in_use) <= 2  # the one that is bound, and what the last reply has not yet told
