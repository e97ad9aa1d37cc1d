"""Tensors of operations that were given up are as before when they are small, and named when they are not."""

from __future__ import annotations

import pytest

from meshbook import ProcMesh, errors
from meshbook.mesh.rank_calls import start_cell


def fail(mesh: ProcMesh, code: str) -> errors.CallFailed:
    with pytest.raises(errors.CallFailed) as caught:
        mesh.run(code).get(30)
    return caught.value


def ranks_told(error: errors.CallFailed, text: str) -> set[int]:
    return set(error.torn.get(text, ()))


def test_small_tensors_are_as_before_after_an_operation_was_given_up(mesh4: ProcMesh) -> None:
    mesh4.run("x = torch.arange(4.0) + rank").get(30)
    for odd in range(4):
        error = fail(mesh4, f"dist.barrier()\nif rank == {odd}: 1 / 0\ndist.all_reduce(x)")
        told = ranks_told(error, "x may be half reduced")
        same = mesh4.run("x.tolist() == (torch.arange(4.0) + rank).tolist()").get(30).values()
        assert {rank for rank in range(4) if not same[rank]} <= told
        if not told:
            assert "all variables kept" in str(error)
        mesh4.run("x = torch.arange(4.0) + rank").get(30)


def test_large_tensors_are_named_with_their_ranks(mesh4: ProcMesh) -> None:
    error = fail(mesh4, "y = torch.ones(5000)\nif rank == 3: 1 / 0\ndist.all_reduce(y)")
    assert ranks_told(error, "y may be half reduced") == {0, 1, 2}
    assert "all other variables kept" in str(error)
    assert "y may be half reduced on ranks 0-2" in str(error)


def test_a_bucket_of_ddp_is_called_gradients(mesh4: ProcMesh) -> None:
    code = """
net = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(40, 40))
loss = net(torch.ones(2, 40)).sum()
dist.barrier()
if rank == 3: 1 / 0
loss.backward()
"""
    text = "gradients of backward(), the tensor (1640,) float32 of all_reduce, may be half reduced"
    assert ranks_told(fail(mesh4, code), text) == {0, 1, 2}


def test_outputs_are_named_by_the_list_or_the_tensor_that_they_are_parts_of(mesh4: ProcMesh) -> None:
    code = """
outs, whole = [torch.zeros(2000) for _ in range(4)], torch.zeros(100, 20)
def share(flat):
    dist.broadcast(flat, src=3)
dist.barrier()
if rank == 3: 1 / 0
"""
    assert ranks_told(fail(mesh4, f"{code}dist.all_gather(outs, outs[0])"), "outs may be half written") == {0, 1, 2}
    error = fail(mesh4, f"{code}dist.broadcast(whole.view(-1), src=3)")
    assert ranks_told(error, "whole may be half written") == {0, 1, 2}


def test_what_nobody_waited_for_is_restored_or_told_too(mesh4: ProcMesh) -> None:
    code = "z = torch.ones(3)\ndist.barrier()\nwork = dist.all_reduce(z, async_op=True) if rank else 1 / 0"
    told = ranks_told(fail(mesh4, code), "z may be half reduced")
    values = mesh4.run("z.tolist()").get(30).values()
    assert {rank for rank in range(1, 4) if values[rank] != [1.0] * 3} <= told


def test_the_error_on_the_rank_names_it_and_what_is_written_after_it_stays(mesh4: ProcMesh) -> None:
    code = """
from meshbook.errors import GroupAborted
small, large, said = torch.ones(3), torch.ones(5000), ""
dist.barrier()
if rank == 0: 1 / 0
try: dist.all_reduce(large)
except GroupAborted as error: said = str(error)
try: dist.all_reduce(small)
except GroupAborted: small.fill_(7)
"""
    fail(mesh4, code)  # `small` is written after its own abort
    values = mesh4.run("(said, small.tolist())").get(30).values()
    mesh4.run("dist.barrier()").get(30)
    assert mesh4.run("small.tolist()").get(30).values()[1:] == [[7.0] * 3] * 3
    for said, small in values[1:]:
        assert "large may be half reduced" in said
        assert small == [7.0] * 3


def test_an_interrupted_operation_leaves_its_tensor_as_before(mesh4: ProcMesh) -> None:
    mesh4.run("x = torch.arange(4.0)").get(30)
    run = start_cell(mesh4, "if rank < 3: dist.all_reduce(x)", on_output=lambda event: None, cell_number=9)
    with pytest.raises(errors.CallTimeout):
        run.future.get(0.5)
    run.interrupt()
    with pytest.raises(errors.CallFailed) as caught:
        run.future.get(30)
    told = ranks_told(caught.value, "x may be half reduced")
    values = mesh4.run("x.tolist()").get(30).values()
    assert {rank for rank in range(4) if values[rank] != [0.0, 1.0, 2.0, 3.0]} <= told
