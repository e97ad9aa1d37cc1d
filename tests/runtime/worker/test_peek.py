"""Peeks: an expression evaluated in the midst of what a rank runs, and what it leaves behind there."""

from __future__ import annotations

import time
from collections.abc import Iterator

import pytest
from patience import wait_until

from meshbook import ProcMesh, errors, this_host
from meshbook.mesh.peeks import NoValue, peek

SPIN = "import time\nlosses = []\nwhile not globals().get('enough'):\n    losses.append(len(losses))\n"
"""A cell that runs until a peek says `ENOUGH`."""

ENOUGH = "__import__('sys').modules['__main__'].__dict__.update(enough=True)"


@pytest.fixture(scope="module")
def pair() -> Iterator[ProcMesh]:
    with this_host().spawn_procs({"gpus": 2}, name="peeked") as mesh:
        yield mesh


def _until(mesh: ProcMesh, expression: str) -> None:
    """Wait until a peek finds the expression true on all ranks."""
    wait_until(lambda: all(value is True for value in peek(mesh, expression).values.values()))


@pytest.fixture
def busy(pair: ProcMesh) -> Iterator[ProcMesh]:
    """Two ranks that run a loop of Python."""
    running = pair.run(SPIN)
    _until(pair, "len(losses) > 1")
    yield pair
    peek(pair, ENOUGH)
    running.get(20)
    pair.run("del enough").get(20)


def test_an_idle_rank_answers_at_once(pair: ProcMesh) -> None:
    pair.run("x = rank").get(30)
    started = time.monotonic()
    peeks = peek(pair, "x + 1")
    assert peeks.values.values() == [1, 2] and dict(peeks.places) == {0: "idle", 1: "idle"}
    assert time.monotonic() - started < 1


def test_a_busy_rank_answers_and_says_where_it_was(busy: ProcMesh) -> None:
    first, second = (peek(busy, "len(losses)") for _ in range(2))
    assert all(0 < one < two for one, two in zip(first.values.values(), second.values.values(), strict=True))
    assert set(first.places.values()) <= {"a cell, line 3", "a cell, line 4"}
    assert all(now > 0 for now in busy.evaluate("len(losses)", now=True).get(10).values())
    assert len(busy.pull("losses", now=True).get(10).values()[0]) > 0


def test_names_that_it_binds_are_dropped(busy: ProcMesh) -> None:
    assert peek(busy, "[(y := 3), [(z := 1) for _ in range(2)]]").values.values() == [[3, [1, 1]]] * 2
    for name in ("y", "z"):
        assert {failure.ename for failure in peek(busy, name).failures} == {"NameError"}


def test_random_state_and_gradient_mode_are_restored(pair: ProcMesh) -> None:
    pair.run("import random, numpy").get(60)
    state = "(random.getstate(), numpy.random.get_state()[1].tolist(), torch.get_rng_state().tolist())"
    draws = "(random.random(), numpy.random.rand(), torch.rand(3), torch.randn(1), torch.set_grad_enabled(False))"
    before = pair.evaluate(state).get(30).values()
    assert not peek(pair, draws).failures
    assert pair.evaluate(state).get(30).values() == before
    assert pair.evaluate("torch.is_grad_enabled()").get(30).values() == [True, True]


@pytest.mark.parametrize(
    "expression",
    [
        "dist.all_reduce(torch.ones(1))",
        "dist.barrier()",
        "dist.send(torch.ones(1), 1 - rank)",
        "dist.distributed_c10d._get_default_store().get('never')",
        "input()",
    ],
)
def test_what_would_wait_is_refused_and_the_groups_stay_sound(busy: ProcMesh, expression: str) -> None:
    peeks = peek(busy, expression)
    assert {failure.ename for failure in peeks.failures} == {"PeekRefused"}
    with pytest.raises(errors.CallFailed, match="is refused in a peek"):
        peeks.checked()


def test_collectives_go_on_after_refused_ones(pair: ProcMesh) -> None:
    peek(pair, "dist.all_reduce(torch.ones(1))")
    assert pair.run("x = torch.ones(1); dist.all_reduce(x); x.item()").get(30).values() == [2.0, 2.0]


@pytest.mark.parametrize(
    "expression",
    [
        "time.sleep(20)",
        "[0 for _ in iter(int, 1)]",
        "[lock := __import__('threading').Lock(), lock.acquire(), lock.acquire()]",
    ],
)
def test_one_that_takes_too_long_ends_with_an_error_of_its_own(busy: ProcMesh, expression: str) -> None:
    started = time.monotonic()
    peeks = peek(busy, expression, timeout_s=0.3)
    assert time.monotonic() - started < 3
    assert {failure.ename for failure in peeks.failures} == {"TimeoutError"}
    assert "longer than 0.3 s" in peeks.failures[0].evalue
    assert peek(busy, "len(losses)").places  # and the loop goes on


def test_one_that_fails_on_some_ranks_gives_the_values_of_the_others(busy: ProcMesh) -> None:
    peeks = peek(busy, "1 // rank")
    assert isinstance(peeks.values.get(0), NoValue) and peeks.values.get(1) == 1
    with pytest.raises(errors.CallFailed, match="rank 0 raised ZeroDivisionError") as raised:
        busy.evaluate("1 // rank", now=True).get(10)
    assert dict(raised.value.partial) == {1: 1}


def test_the_error_of_the_cell_is_not_in_that_of_the_peek(pair: ProcMesh) -> None:
    handling = pair.run("try:\n    1 / 0\nexcept ZeroDivisionError:\n    for _ in range(30): time.sleep(0.1)")
    _until(pair, "__import__('sys').exc_info()[0] is ZeroDivisionError")
    failure = peek(pair, "nowhere.near").failures[0]
    handling.interrupt()  # type: ignore[attr-defined]
    assert failure.ename == "NameError" and "ZeroDivision" not in "".join(failure.traceback)


def test_a_rank_in_native_code_says_where_and_the_others_answer(pair: ProcMesh) -> None:
    running = pair.run("import ctypes, time\nctypes.CDLL(None).sleep(3) if rank == 0 else time.sleep(3)")
    time.sleep(0.5)
    started = time.monotonic()
    peeks = peek(pair, "rank")
    assert time.monotonic() - started < 2.5
    told = peeks.values.get(0)
    assert isinstance(told, NoValue) and "a cell, line 2" in told.why and peeks.values.get(1) == 1
    assert running.get(20).values() == [0, None]  # the sleep was not cut short


def test_a_rank_whose_native_code_holds_the_gil_says_so(pair: ProcMesh) -> None:
    running = pair.run("import ctypes, time\nctypes.PyDLL(None).sleep(3) if rank == 0 else time.sleep(3)")
    time.sleep(0.5)
    peeks = peek(pair, "rank")
    told = peeks.values.get(0)
    assert isinstance(told, NoValue) and "holds the GIL" in told.why and peeks.values.get(1) == 1
    running.get(20)


def test_a_rank_that_waits_in_a_collective_answers(pair: ProcMesh) -> None:
    late = "while rank == 0 and not globals().get('enough'): time.sleep(0.01)"
    running = pair.run(f"{late}\nx = torch.ones(1); dist.all_reduce(x); x.item()")
    wait_until(lambda: peek(pair, "rank").places[1] == "a cell, line 2")
    assert peek(pair, "rank").values.values() == [0, 1]
    peek(pair, ENOUGH)
    assert running.get(20).values() == [2.0, 2.0]
    pair.run("del enough").get(20)


def test_an_interrupt_that_comes_during_a_peek_reaches_the_cell(pair: ProcMesh) -> None:
    running = pair.run("while True: time.sleep(0.01)")
    time.sleep(0.3)
    looked = pair.evaluate("time.sleep(20)", now=True, timeout_s=20)
    time.sleep(0.5)
    started = time.monotonic()
    with pytest.raises(errors.CallInterrupted):
        raise running.interrupt()  # type: ignore[attr-defined]
    running.exception(5)
    assert time.monotonic() - started < 5
    with pytest.raises(errors.CallFailed, match="interrupted meanwhile"):
        looked.get(10)


def test_a_rank_that_ends_in_a_peek_is_lost() -> None:
    with this_host().spawn_procs({"gpus": 2}, name="ending") as mesh:
        peeks = peek(mesh, "__import__('os').abort() if rank else 7")
        assert peeks.values.get(0) == 7
        with pytest.raises(errors.WorkerLost, match="SIGABRT"):
            peeks.checked()


@pytest.mark.parametrize("count", [200, pytest.param(1000, marks=pytest.mark.slow)])
def test_many_peeks_leave_the_losses_as_they_are(pair: ProcMesh, count: int) -> None:
    training = """
torch.manual_seed(7 + rank)
model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(64, 8))
optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
losses = []
for _ in range(300):
    loss = (model(torch.randn(32, 64)) - torch.randn(32, 8)).pow(2).mean()
    optimizer.zero_grad(); loss.backward(); optimizer.step()
    losses.append(loss.item())
losses
"""
    alone = pair.run(training).get(60).values()
    seen = 0
    while seen < count:
        running = pair.run(training)
        while not running.done():
            peeks = peek(pair, "(torch.rand(2), len(losses), model.module.weight.sum().item())[1]")
            seen += set(peeks.places.values()) != {"idle"}
        assert running.get(60).values() == alone
