"""Tensors that do not lie in one piece: operations that work in place reach their elements and nothing beside them."""

from __future__ import annotations

from typing import Any

import pytest

from meshbook import ProcMesh, errors


def run(mesh: ProcMesh, code: str) -> list[Any]:
    return mesh.run(code).get(60).values()


BASE = "b = torch.tensor([[1., 10.], [2., 20.]]) * (rank + 1)\n"
OWN = [[[10.0], [20.0]], [[20.0], [40.0]]]


@pytest.mark.parametrize(
    ("operation", "wanted"),
    [
        ("dist.all_reduce(b[:, 0])", [[3.0, 6.0], [3.0, 6.0]]),
        ("dist.all_reduce(b[:, 0], op=dist.ReduceOp.MAX)", [[2.0, 4.0], [2.0, 4.0]]),
        ("dist.broadcast(b[:, 0], 1)", [[2.0, 4.0], [2.0, 4.0]]),
        ("dist.reduce(b[:, 0], 0)", [[3.0, 6.0], None]),
        ("dist.all_reduce_coalesced([b[:, 0], torch.ones(2)])", [[3.0, 6.0], [3.0, 6.0]]),
        ("dist.all_reduce(b[:, 0], async_op=True).wait()", [[3.0, 6.0], [3.0, 6.0]]),
        ("dist.all_reduce(b[:, 0], async_op=True).get_future().wait()", [[3.0, 6.0], [3.0, 6.0]]),
        ("dist.scatter(b[:, 0], [torch.arange(4.)[::2], torch.arange(4.)[1::2]] if rank == 0 else None, 0)",
         [[0.0, 2.0], [1.0, 3.0]]),
    ],
)  # fmt: skip
@pytest.mark.filterwarnings("ignore:torch.distributed.all_reduce_coalesced")
def test_a_column_is_written_and_its_neighbours_are_not(
    mesh2: ProcMesh, operation: str, wanted: list[list[float] | None]
) -> None:
    got = run(mesh2, f"{BASE}{operation}\nb[:, 0].tolist(), b[:, 1:].tolist()")
    for each, (column, _) in zip(wanted, got, strict=True):
        assert each is None or column == each
    assert [rest for _, rest in got] == OWN


def test_nobody_need_wait_for_what_goes_on_by_itself(mesh2: ProcMesh) -> None:
    code = f"{BASE}import time\nwork = dist.all_reduce(b[:, 0], async_op=True)\nend = time.monotonic() + 30\n"
    code += "while not work.is_completed() and time.monotonic() < end: time.sleep(0.01)\nb.tolist()"
    assert run(mesh2, code) == [[[3.0, 10.0], [6.0, 20.0]], [[3.0, 20.0], [6.0, 40.0]]]


def test_a_wait_reaches_the_operation_where_the_device_waits_for_it(mesh2: ProcMesh) -> None:
    """NCCL's streams wait only for the operations whose wait reaches C++."""
    code = "import time\nb = torch.ones(2)\nif rank: time.sleep(0.5)\nwork = dist.all_reduce(b, async_op=True)\n"
    code += "work.on_stream = True\nwork.wait()\nwork.is_completed(), b.tolist()"
    assert run(mesh2, code) == [(True, [2.0, 2.0])] * 2


def test_ranks_may_lay_out_equal_tensors_in_different_ways(mesh2: ProcMesh) -> None:
    code = "x = torch.arange(4.).view(2, 2)\nx = x if rank else x.t().contiguous().t()\ndist.all_reduce(x)\nx.tolist()"
    assert run(mesh2, code) == [[[0.0, 2.0], [4.0, 6.0]]] * 2


def test_a_negative_view_is_reduced_by_its_values(mesh2: ProcMesh) -> None:
    code = "t = torch.full((2,), 1 + 2j)\nx = t.conj().imag\ndist.all_reduce(x)\nx.tolist(), t.imag.tolist()"
    assert run(mesh2, code) == [([-4.0, -4.0], [4.0, 4.0])] * 2


@pytest.mark.parametrize("made", ["torch.arange(4.).expand(3, 4)", "torch.ones(1).expand(4)"])
def test_an_expanded_tensor_is_refused(mesh2: ProcMesh, made: str) -> None:
    with pytest.raises(errors.CallFailed, match=r"ValueError: all_reduce writes to its tensor, .* is expanded"):
        run(mesh2, f"x = {made}\ndist.all_reduce(x)")
    assert run(mesh2, "x = torch.ones(2); dist.all_reduce(x); x.tolist()") == [[2.0, 2.0]] * 2


def test_an_operation_that_is_given_up_leaves_such_a_tensor_as_it_was(mesh2: ProcMesh) -> None:
    with pytest.raises(errors.CallFailed):
        run(mesh2, f"{BASE}if rank: raise ValueError('mine')\ndist.all_reduce(b[:, 0])")
    assert run(mesh2, "b.tolist()")[0] == [[1.0, 10.0], [2.0, 20.0]]
    assert run(mesh2, "dist.all_reduce(b[:, 0]); b[:, 0].tolist()") == [[3.0, 6.0]] * 2
