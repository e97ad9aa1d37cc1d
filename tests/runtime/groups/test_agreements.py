"""Ranks that enter different operations as one are told so, and those that do not never are."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from collector import Collector
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from meshbook import ProcMesh, errors, this_host
from meshbook.actor import Actor, endpoint
from meshbook.calls.output import Notice
from meshbook.groups.agreements import Agreements, Progress, Splits, Told, find_disagreements
from meshbook.groups.operands import describe
from meshbook.groups.progress import Collectives, Entered, GroupProgress, Parts
from meshbook.groups.records import Record
from meshbook.mesh.rank_calls import start_cell

WORKS = "t = torch.ones(3)\ndist.all_reduce(t)\nt.tolist()"


@pytest.fixture(autouse=True)
def whole(request: pytest.FixtureRequest) -> Iterator[None]:
    """After each test with a mesh its groups work."""
    yield
    for name in {"mesh4", "square"} & set(request.fixturenames):
        assert request.getfixturevalue(name).run(WORKS).get(30).values() == [[4.0] * 3] * 4


def disagree(mesh: ProcMesh, code: str) -> tuple[str, errors.CallFailed, list[str]]:
    """Run a cell in which ranks disagree: what its error says first, the error, and what was said meanwhile."""
    output = Collector()
    run = start_cell(mesh, code, on_output=output, cell_number=9, line_offset=1)
    with pytest.raises(errors.CallFailed) as caught:
        run.future.get(30)
    disagreeing = next(f for f in caught.value.failures if f.ename == "RanksDisagree").load()
    assert isinstance(disagreeing, errors.RanksDisagree)
    assert disagreeing.ranks == (0, 1, 2, 3)
    notices = [event.text for event in output.events if isinstance(event, Notice)]
    return str(disagreeing), caught.value, notices


# ---- cells -----------------------------------------------------------------------------------------------------------


def test_other_shapes_are_told_while_a_rank_hangs_and_when_the_cell_ends(mesh4: ProcMesh) -> None:
    said, error, notices = disagree(mesh4, "z = torch.ones(4 if rank else 5)\ndist.all_reduce(z)")
    assert said == "ranks 0 and 1-3 disagree in all_reduce (cell 9, line 3): (5,) against (4,)"
    assert str(error).startswith(said)
    assert not error.partial, "values that came of it mean nothing"
    assert all(said in notice for notice in notices)
    assert notices or not error.freed


def test_calls_that_wait_behind_one_in_which_ranks_disagree_are_not_to_blame(mesh4: ProcMesh) -> None:
    guilty = mesh4.run("dist.all_reduce(torch.ones(4 if rank else 5))")
    behind = [mesh4.run(f"import time; time.sleep({pause_s}); 'kept'") for pause_s in (0, 0.3, 0)]
    failed = guilty.exception(30)
    assert isinstance(failed, errors.CallFailed) and failed.failures[0].ename == "RanksDisagree"
    assert [call.get(30).values() for call in behind] == [["kept"] * 4] * 3


@pytest.mark.parametrize("size", [3, 5])
@pytest.mark.parametrize("pause_s", [0, 0.02, 0.1, 0.3])
def test_a_rank_whose_cell_failed_is_freed_of_what_it_enters_in_the_next_one(
    mesh4: ProcMesh, pause_s: float, size: int
) -> None:
    failing = mesh4.run("if rank == 1: raise ValueError\ndist.all_reduce(torch.ones(3))")
    behind = mesh4.run(f"import time; time.sleep({pause_s}); dist.all_reduce(torch.ones({size}))")
    failed, late = failing.exception(30), behind.exception(30)
    assert isinstance(failed, errors.CallFailed) and failed.failures[0].ename == "ValueError"
    assert late is None or isinstance(late, errors.CallFailed)
    names = {failure.ename for error in (failed, late) if error is not None for failure in error.failures}
    assert names <= {"ValueError", "GroupAborted"}


@pytest.mark.quick("dist.all_reduce(x, op=dist.ReduceOp.MAX if odd else dist.ReduceOp.SUM)-sum against max")
@pytest.mark.parametrize(
    ("code", "how"),
    [
        ("dist.all_reduce(torch.ones(4, dtype=torch.int32 if odd else torch.float32))", "float32 against int32"),
        ("dist.all_reduce(torch.ones(4, device='meta' if odd else 'cpu'))", "float32 against no data (meta device)"),
        ("dist.all_reduce(x, op=dist.ReduceOp.MAX if odd else dist.ReduceOp.SUM)", "sum against max"),
        ("dist.broadcast(x, src=1 if odd else 0)", "root 0 against root 1"),
        ("dist.broadcast(x[:2] if odd else x, src=0)", "(4,) against (2,)"),
        ("dist.reduce(x[:2] if odd else x, dst=1)", "(4,) against (2,)"),
        ("dist.all_gather_into_tensor(torch.ones(4 * n), torch.ones(n))", "(4,) against (2,)"),
        ("dist.all_gather([torch.ones(n) for _ in range(4)], torch.ones(n))", "4 x (4,) against 4 x (2,)"),
        ("dist.reduce_scatter_tensor(torch.ones(n), torch.ones(4 * n))", "(4,) against (2,)"),
        ("dist.all_reduce(torch.ones(n * 100000), async_op=True).wait()", "(400000,) against (200000,)"),
    ],
)
def test_what_must_be_equal_is_compared_whatever_gloo_returns(mesh4: ProcMesh, code: str, how: str) -> None:
    said, *_ = disagree(mesh4, f"odd = rank == 3\nn = 2 if odd else 4\nx = torch.ones(4)\n{code}")
    assert said.startswith("ranks 0-2 and 3 disagree in ")
    assert said.endswith(f"(cell 9, line 5): {how}")


def test_operations_in_another_order_are_told_with_both_places(mesh4: ProcMesh) -> None:
    code = """
        if rank == 1:
            dist.all_reduce(torch.ones(4), op=dist.ReduceOp.MAX)
            dist.barrier()
        else:
            dist.barrier()
            dist.all_reduce(torch.ones(4), op=dist.ReduceOp.MAX)
    """
    said, error, _ = disagree(mesh4, _dedent(code))
    assert "barrier against all_reduce" in said and "rank 1 at cell 9, line 4" in said
    assert error.freed


def test_a_subgroup_is_told_of_and_the_other_one_is_not(square: ProcMesh) -> None:
    code = 'dist.all_reduce(torch.ones(2 if rank == 3 else 3), group=mesh["tp"].get_group())'
    with pytest.raises(errors.CallFailed) as caught:
        square.run(code).get(30)
    assert "ranks 2 and 3 disagree in all_reduce" in str(caught.value)
    assert {0, 1} <= caught.value.partial.keys()


SENT = "rank 0 sent 4 x float32 to rank 1 (cell 9, line 3)"
MESSAGES = {
    "a bigger receive": ("send(x, 1)", "recv(torch.zeros(5), 0)", "5 x float32"),
    "a smaller receive": ("send(x, 1)", "recv(torch.zeros(3), 0)", "3 x float32"),
    "another dtype": ("send(x, 1)", "recv(torch.zeros(2, dtype=torch.float64), 0)", "2 x float64"),
    "asynchronous": ("isend(x, 1).wait()", "irecv(torch.zeros(5), 0).wait()", "5 x float32"),
    "with a tag": ("send(x, 1, tag=7)", "recv(torch.zeros(5), 0, tag=7)", "5 x float32"),
    "in a batch": (
        "batch_isend_irecv([dist.P2POp(dist.isend, x, 1)])[0].wait()",
        "batch_isend_irecv([dist.P2POp(dist.irecv, torch.zeros(5), 0)])[0].wait()",
        "5 x float32",
    ),
}


PARTS = {
    "more given": ([1, 2, 1, 1], [1, 1, 1, 1], 1, "rank 3 gives 2 x float32 to rank 1", "1 x float32"),
    "less given": ([1, 0, 1, 1], [1, 1, 1, 1], 1, "rank 3 gives 0 x float32 to rank 1", "1 x float32"),
    "more taken": ([1, 1, 1, 1], [1, 2, 1, 1], 1, "rank 1 gives 1 x float32 to rank 3", "2 x float32"),
    "rows": ([1, 3, 1, 1], [1, 1, 1, 1], 2, "rank 3 gives 6 x float32 to rank 1", "2 x float32"),
}
"""What rank 3 gives and takes where all others give and take one row of each, how wide a row is, and what is said."""


@pytest.mark.parametrize("kind", PARTS)
def test_parts_of_an_all_to_all_are_compared_for_each_pair(mesh4: ProcMesh, kind: str) -> None:
    gives, takes, width, who, as_what = PARTS[kind]
    code = f"""
        gives, takes = ({gives}, {takes}) if rank == 3 else ([1] * 4, [1] * 4)
        given, taken = torch.ones(sum(gives), {width}), torch.zeros(sum(takes), {width})
        dist.all_to_all_single(taken, given, takes, gives)
    """
    said = disagree_in_a_message(mesh4, _dedent(code), ranks=(1, 3))
    assert said == f"{who} in all_to_all_single (cell 9, line 5), which takes {as_what}"


@pytest.mark.parametrize("kind", MESSAGES)
def test_a_message_received_as_something_else_than_was_sent_is_told(mesh4: ProcMesh, kind: str) -> None:
    send, receive, as_what = MESSAGES[kind]
    said = disagree_in_a_message(mesh4, f"x = torch.ones(4)\nif rank == 0: dist.{send}\nif rank == 1: dist.{receive}")
    assert said == f"{SENT}, which received {as_what} (cell 9, line 4)"


def test_a_message_in_a_subgroup_is_told_by_ranks_of_the_mesh(square: ProcMesh) -> None:
    code = """
        tp = mesh["tp"].get_group()
        if rank == 2: dist.send(torch.ones(4), group=tp, group_dst=1)
        if rank == 3: dist.recv(torch.zeros(4, dtype=torch.int32), group=tp, group_src=0)
    """
    said = disagree_in_a_message(square, _dedent(code), ranks=(2, 3))
    assert said.startswith("rank 2 sent 4 x float32 to rank 3 (cell 9, line ")
    assert "which received 4 x int32" in said


def test_a_message_is_told_whose_send_is_of_an_earlier_cell(mesh4: ProcMesh) -> None:
    mesh4.run("if rank == 0: work = dist.isend(torch.ones(4), 1)").get(30)
    said = disagree_in_a_message(mesh4, "if rank == 1: dist.recv(torch.zeros(5), 0)\nif rank == 0: work.wait()")
    assert said.endswith("which received 5 x float32 (cell 9, line 2)")


def test_messages_of_all_pairs_are_told_once(mesh4: ProcMesh) -> None:
    code = """
        work = dist.isend(torch.ones(4), (rank + 1) % 4)
        dist.recv(torch.zeros(5), (rank - 1) % 4)
        work.wait()
    """
    said = disagree_in_a_message(mesh4, _dedent(code), ranks=(0, 1, 2, 3))
    assert said.endswith("and so 3 more pairs of ranks")


def test_a_message_far_back_is_told_by_its_ranks(mesh4: ProcMesh) -> None:
    code = """
        if rank == 0: dist.send(torch.ones(4), 1)
        if rank == 1: dist.recv(torch.zeros(5), 0)
        for _ in range(300):
            if rank == 0: dist.send(torch.ones(1), 1)
            if rank == 1: dist.recv(torch.zeros(1), 0)
    """
    said = disagree_in_a_message(mesh4, _dedent(code))
    assert said == "rank 1 received something else than rank 0 sent it, some messages ago" or said.startswith(
        "rank 0 sent 4"
    )


def disagree_in_a_message(mesh: ProcMesh, code: str, ranks: tuple[int, ...] = (0, 1)) -> str:
    """Run a cell in which ranks exchange a message they disagree in: what its error says."""
    with pytest.raises(errors.CallFailed) as caught:
        start_cell(mesh, code, on_output=Collector(), cell_number=9, line_offset=1).future.get(30)
    told = [failure.load() for failure in caught.value.failures if failure.ename == "RanksDisagree"]
    assert [error.ranks for error in told if isinstance(error, errors.RanksDisagree)] == [ranks] * len(ranks)
    assert len(set(map(str, told))) == 1
    return str(told[0])


def test_a_disagreement_far_back_is_told_by_its_group(mesh4: ProcMesh) -> None:
    said, *_ = disagree(
        mesh4,
        "dist.all_reduce(torch.ones(4), op=dist.ReduceOp.MAX if rank else dist.ReduceOp.SUM)\n"
        "for _ in range(300): dist.barrier()",
    )
    remembered = "all_reduce (cell 9, line 2): "  # asked while they ran on, by a slow machine
    assert said.startswith(tuple(f"ranks 0 and 1-3 disagree in {each}" for each in ("one of the first ", remembered)))


def test_what_ends_a_process_still_does(mesh4: ProcMesh) -> None:
    """Only gloo's threads are kept from it."""
    with this_host().spawn_procs({"gpus": 2}, name="abort") as mesh:
        mesh.run(WORKS).get(30)
        with pytest.raises(errors.WorkerLost, match="SIGABRT"):
            mesh.run("import os\nif rank: os.abort()").get(30)


HANDLERS = """
import ctypes, signal
libc, action = ctypes.CDLL(None), ctypes.create_string_buffer(1024)
handlers = []
for number in (signal.SIGABRT, signal.SIGSEGV):
    assert libc.sigaction(int(number), None, action) == 0
    handlers.append(int.from_bytes(action[:8], "little"))
handlers[0] == handlers[1] > 1
"""


def test_a_signal_to_abort_is_answered_by_no_python(mesh4: ProcMesh) -> None:
    """It comes from outside as well, to a thread that may hold any lock of the interpreter, which would wait for it."""
    assert mesh4.run(f"{WORKS}\n{HANDLERS}").get(30).values() == [True] * 4


# ---- actors ----------------------------------------------------------------------------------------------------------


class Learner(Actor):
    @endpoint
    def step(self, odd: int) -> float:
        import torch
        import torch.distributed as dist

        x = torch.ones(4)
        dist.all_reduce(x, op=dist.ReduceOp.MAX if dist.get_rank() == odd else dist.ReduceOp.SUM)
        return float(x[0])

    @endpoint
    def steps(self, odd: int) -> float:
        """Take two steps, in the other order on one rank."""
        import torch
        import torch.distributed as dist

        x = torch.ones(4)
        steps = [dist.barrier, lambda: dist.all_reduce(x)]
        for step in reversed(steps) if dist.get_rank() == odd else steps:
            step()
        return float(x[0])


def test_actors_that_disagree_are_told_and_freed_and_their_groups_are_formed_again(mesh4: ProcMesh) -> None:
    learners = mesh4.spawn("learner", Learner)
    try:
        for odd in (2, 0):
            assert learners.step.call(-1).get(30).values() == [4.0] * 4
            with pytest.raises(errors.CallFailed, match=rf"\b{odd}( and [\d,-]+)? disagree in all_reduce .*against"):
                learners.step.call(odd).get(30)
            assert mesh4.run(WORKS).get(30).values() == [[4.0] * 3] * 4
            with pytest.raises(errors.CallFailed, match=r"disagree in operation .*(barrier|all_reduce) against"):
                learners.steps.call(odd).get(30)
            assert learners.steps.call(-1).get(30).values() == [4.0] * 4
    finally:
        learners.stop().get(30)


# ---- no false alarm --------------------------------------------------------------------------------------------------

HEALTHY = {
    "objects": "o = [None] * 4\ndist.all_gather_object(o, 'x' * 100 * rank)\ndist.broadcast_object_list(o, src=2)",
    "gather": "dist.gather(x, [torch.zeros(4) for _ in range(4)] if rank == 1 else None, dst=1)",
    "gather_object": "dist.gather_object('y' * rank, [None] * 4 if rank == 0 else None)",
    "scatter": "dist.scatter(x, [torch.ones(4)] * 4 if rank == 2 else None, src=2)",
    "scatter_object_list": "dist.scatter_object_list([None], ['a', 'bb', 3, None] if rank == 0 else None)",
    "all_to_all": "dist.all_to_all([torch.zeros(2) for _ in range(4)], [torch.ones(2) for _ in range(4)])",
    "all_to_all_single": """
        n = rank + 1
        dist.all_to_all_single(torch.zeros(4 * n), torch.ones(10), [n] * 4, [1, 2, 3, 4])
    """,
    "all_to_all of rows": """
        if rank: dist.all_to_all_single(torch.zeros(8), torch.ones(4, 2))
        else: dist.all_to_all_single(torch.zeros(4, 2), torch.ones(8), [1] * 4, [2] * 4)
    """,
    "all_to_all with nothing for some": """
        n = [0, 0, 3, 0] if rank != 2 else [3] * 4
        dist.all_to_all_single(torch.zeros(sum(n), 5), torch.ones(sum(n), 5), n, n)
    """,
    "sizes of one": "dist.all_reduce(torch.ones(4).view((4,) if rank else (1, 4, 1)))",
    "scalars": "dist.all_reduce(torch.tensor(1.0) if rank else torch.ones(1))",
    "sends": """
        dist.barrier()
        if rank == 0: dist.send(torch.ones(3), 1)
        if rank == 1: dist.recv(torch.zeros(3), 0)
    """,
    "reshaped messages": """
        if rank == 0: dist.send(torch.ones(3, 4), 1)
        if rank == 1: dist.recv(torch.zeros(12), 0)
    """,
    "a ring": """
        for n in range(1, 9):
            ops = [dist.P2POp(dist.isend, torch.ones(n), (rank + 1) % 4)]
            ops += [dist.P2POp(dist.irecv, torch.zeros(n), (rank - 1) % 4)]
            for work in dist.batch_isend_irecv(ops): work.wait()
    """,
    "a pipeline": """
        got = [torch.zeros(n + 1) for n in range(6)]
        for y in got:
            if rank > 0: dist.recv(y, rank - 1)
            if rank < 3: dist.send(y, rank + 1)
        for y in reversed(got):
            if rank < 3: dist.recv(y, rank + 1)
            if rank > 0: dist.send(y, rank - 1)
    """,
    "objects sent": """
        if rank == 0: dist.send_object_list(["x" * 1000, 3, None], 2)
        if rank == 2: dist.recv_object_list([None] * 3, 0)
        if rank == 0: dist.send_object_list(["x" * 10, 3], 2)
        if rank == 2: dist.recv_object_list([None] * 2, 0)
    """,
    "tags in another order": """
        if rank == 0: works = [dist.isend(torch.ones(n), 1, tag=n) for n in (1, 2, 3)]
        if rank == 1: works = [dist.irecv(torch.ones(n), 0, tag=n) for n in (3, 2, 1)]
        if rank < 2: [work.wait() for work in works]
    """,
    "receives from anybody": """
        if rank == 0:
            for n in range(3): dist.recv(torch.zeros(4))
            dist.recv(torch.zeros(2), 1, tag=1)
        else: dist.send(torch.ones(4), 0)
        if rank == 1: dist.send(torch.ones(2), 0, tag=1)
    """,
    "messages in subgroups": """
        group = dist.new_group([3, 1])
        if rank == 3: dist.send(torch.ones(5), 1, group=group)
        if rank == 1: dist.recv(torch.ones(5), 3, group=group)
        if rank == 3: dist.send(torch.ones(6), 1)
        if rank == 1: dist.recv(torch.ones(6), 3)
    """,
    "coalesced": "dist.all_reduce_coalesced([torch.ones(2), torch.ones(3, 3)])",
    "asynchronous": """
        works = [dist.all_reduce(torch.ones(n), async_op=True) for n in range(1, 9)]
        for work in works: work.wait()
    """,
    "functional": """
        import torch.distributed._functional_collectives as fc
        fc.all_gather_tensor(torch.ones(2, 2), 1, dist.group.WORLD) + 0
        fc.reduce_scatter_tensor(torch.ones(8), "sum", 0, dist.group.WORLD) + 0
        fc.all_reduce(torch.ones(2), "sum", dist.group.WORLD) + 0
    """,
    "new group": "g = dist.new_group([1, 3])\nif rank in (1, 3): dist.all_reduce(torch.ones(rank and 5), group=g)",
    "uneven DTensors": """
        from torch.distributed.tensor import Replicate, Shard, distribute_tensor
        d = distribute_tensor(torch.arange(15.0).view(5, 3), mesh, [Shard(0)])
        d.redistribute(placements=[Shard(1)]).full_tensor().sum() + (d @ d.T).full_tensor().sum()
    """,
    "DDP": """
        ddp = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(4, 4), find_unused_parameters=True)
        for n in range(3): ddp(torch.ones(rank + 1, 4)).sum().backward()
    """,
    "FSDP2": """
        from torch.distributed.fsdp import fully_shard
        fsdp = torch.nn.Sequential(torch.nn.Linear(5, 3), torch.nn.Linear(3, 7))
        fully_shard(fsdp, mesh=mesh)
        for n in range(3): fsdp(torch.ones(rank + 1, 5)).sum().backward()
    """,
    "DCP": """
        import tempfile, torch.distributed.checkpoint as dcp
        folder = [tempfile.mkdtemp() if rank == 0 else None]
        dist.broadcast_object_list(folder)
        state = {"w": torch.ones(3) * rank, "n": rank}
        dcp.save(state, checkpoint_id=folder[0])
        dcp.load(state, checkpoint_id=folder[0])
    """,
}


@pytest.mark.some()
@pytest.mark.quick("reshaped messages")
@pytest.mark.parametrize("kind", HEALTHY)
def test_healthy_programs_give_no_alarm(mesh4: ProcMesh, kind: str, groups: _Watched) -> None:
    mesh4.run(f"x = torch.ones(4)\n{_dedent(HEALTHY[kind])}").get(60)
    assert not groups.doubted
    assert groups.told == {True}


@pytest.mark.slow
def test_calls_of_some_ranks_whose_operations_overlap_give_no_alarm(mesh4: ProcMesh, groups: _Watched) -> None:
    for _ in range(5):
        some = mesh4.slice(gpus=slice(0, 2)).run("for n in range(1, 30): dist.all_reduce(torch.ones(n))")
        others = mesh4.slice(gpus=slice(2, 4)).run("for n in range(1, 30): dist.all_reduce(torch.ones(n))")
        some.get(30), others.get(30)
    assert not groups.doubted


def test_sends_of_a_later_cell_that_are_under_way_give_no_alarm(mesh4: ProcMesh, groups: _Watched) -> None:
    for n in range(1, 6):
        mesh4.run(f"if rank == 0: works = [dist.isend(torch.ones({n} + k), 1) for k in range(3)]").get(30)
        mesh4.run(f"if rank == 1: [dist.recv(torch.ones({n} + k), 0) for k in range(2)]").get(30)
        mesh4.run(f"if rank == 1: dist.recv(torch.ones({n} + 2), 0)\nif rank == 0: [w.wait() for w in works]").get(30)
    assert groups.told == {True}


def _dedent(code: str) -> str:
    return "\n".join(line.removeprefix("        ") for line in code.splitlines())


class _Watched:
    """Tells whether the controller ever doubts the groups of a mesh, from now on."""

    def __init__(self, agreements: Agreements, monkeypatch: pytest.MonkeyPatch) -> None:
        self._agreements, self._compare = agreements, agreements.compare
        self.told: set[bool] = set()
        monkeypatch.setattr(agreements, "compare", self._watch)

    def _watch(self, rank: int, told: Told) -> None:
        self._compare(rank, told)
        self.told.add(not self._agreements.doubted)

    @property
    def doubted(self) -> bool:
        return self._agreements.doubted


@pytest.fixture
def groups(mesh4: ProcMesh, monkeypatch: pytest.MonkeyPatch) -> _Watched:
    """What the controller compares for the mesh."""
    return _Watched(mesh4._controller._dispatcher.groups_of(mesh4._mesh).machine.agreements, monkeypatch)


# ---- pure ------------------------------------------------------------------------------------------------------------


def test_only_equal_numbers_of_one_epoch_are_compared() -> None:
    agreements = Agreements()
    agreements.compare(0, Told(3, (Progress("0", 5, 11), Progress("1", 2, 7))))
    agreements.compare(1, Told(3, (Progress("0", 6, 12), Progress("1", 2, 7))))
    agreements.compare(1, Told(2, (Progress("0", 6, 99),)))
    assert not agreements.doubted
    agreements.compare(0, Told(4, (Progress("0", 6, 99),)))
    assert not agreements.doubted
    agreements.compare(1, Told(4, (Progress("0", 6, 98),)))
    assert agreements.doubted


@settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(st.data())
def test_weights_of_parts_add_up_to_0_where_all_match(data: st.DataObject) -> None:
    size, count = data.draw(st.integers(1, 5)), data.draw(st.integers(1, 4))
    sizes = st.lists(st.lists(st.integers(0, 2**40), min_size=size, max_size=size), min_size=size, max_size=size)
    given_to = [data.draw(sizes) for _ in range(count)]
    taken = [[list(parts) for parts in zip(*given, strict=True)] for given in given_to]
    if odd := data.draw(st.booleans()):
        wrong = data.draw(st.integers(0, count - 1)), data.draw(st.integers(0, size - 1))
        taken[wrong[0]][wrong[1]][data.draw(st.integers(0, size - 1))] += data.draw(st.integers(1, 100))
    agreements = Agreements()
    for rank in range(size):
        record = Record(1)
        for number in range(count):
            parts = Parts(tuple(given_to[number][rank]), tuple(taken[number][rank]))
            record.add(number + 1, describe("alltoall", ()), parts, rank)
        assert not agreements.doubted
        for _ in range(2):  # it is told with every answer
            agreements.compare(rank, Told(1, (), splits=(Splits("0", *record.splits, size),)))
    assert agreements.doubted == odd


def test_groups_of_a_former_epoch_are_left_out() -> None:
    def told(epoch: int, code: int) -> Collectives:
        entered = (Entered(1, code, "barrier", ("", "", "", ""), ""),)
        return Collectives(epoch, 0, (GroupProgress("0", (0, 1), 1, {}, {}, epoch, 1, code, entered),), (), 0, "")

    assert find_disagreements({0: told(3, 1), 1: told(4, 2)}) == []
    assert len(find_disagreements({0: told(4, 1), 1: told(4, 2)})) == 1
