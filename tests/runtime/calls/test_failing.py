"""One error tells of all ranks that fail together, and soon where nobody else can fail."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from patience import wait_until

from meshbook import ProcMesh, errors, this_host
from meshbook.calls.call import OpenCall
from meshbook.calls.call_future import CallFuture
from meshbook.concurrency.future import Future
from meshbook.controller import controller
from meshbook.controller.watched_calls import FAILS_WITHIN_S, FAILURE_GRACE_S, LONGEST_GRACE_S, FailingCall
from meshbook.shape.members import Region
from meshbook.system.processes import process_state
from meshbook.wire import messages as wire

RANKS = 4
NOW = 100.0


def failing_call() -> tuple[OpenCall, FailingCall]:
    call = OpenCall(1, 1, "work", Region.of({"gpus": RANKS}), Future(), fail_fast=True)
    fail(call, 0)
    return call, FailingCall(call, NOW)


def fail(call: OpenCall, rank: int) -> None:
    call.answer(wire.RankReply(rank, wire.GONE, 0, 0.0, None), (), ())


def tell(failing: FailingCall, now: float, **states: tuple[str, float]) -> None:
    """Answer the question for states; keywords: ``r1=("R", 0.5)``."""
    failing.on_states({int(rank[1:]): wire.ProcessState(*state) for rank, state in states.items()}, now)


def test_it_is_told_at_once_when_no_other_rank_runs() -> None:
    failing = failing_call()[1]
    assert failing.due == NOW and not failing.is_ripe(NOW) and failing.must_ask(NOW)
    assert not failing.must_ask(NOW + 0.1)  # one question at a time
    assert not failing.is_ripe(NOW + 0.1)
    tell(failing, NOW + 0.1, r1=("S", 1.0), r2=("S", 1.0), r3=("T", 1.0))
    assert failing.due <= NOW + 0.1 and failing.is_ripe(NOW + 0.1)


def test_it_waits_for_ranks_that_run_until_they_have_had_time_to_fail() -> None:
    call, failing = failing_call()
    now = NOW
    for ran_s in (1.0, 1.01):
        assert not failing.is_ripe(now) and failing.must_ask(now)
        tell(failing, now, r1=("S", 1.0), r2=("R", ran_s), r3=("S", 1.0))
        assert not failing.must_ask(now)
        now = failing.due
    assert not failing.is_ripe(now) and failing.must_ask(now)
    tell(failing, now, r1=("S", 1.0), r2=("S", 1.01))  # rank 3 is not known: its host has no time
    now = failing.due
    assert not failing.is_ripe(now) and failing.must_ask(now)
    fail(call, 3)
    tell(failing, now, r1=("S", 1.0), r2=("R", 1.0 + FAILS_WITHIN_S))
    assert failing.is_ripe(now)


def test_where_agents_do_not_answer_it_does_not_wait_for_ever() -> None:
    failing = failing_call()[1]
    assert failing.must_ask(NOW) and failing.due == NOW + LONGEST_GRACE_S
    assert not failing.is_ripe(NOW + LONGEST_GRACE_S / 2) and failing.is_ripe(failing.due)


def test_nobody_is_asked_about_those_that_die_together_and_a_death_alone_is_told_at_once() -> None:
    call = OpenCall(1, 1, "work", Region.of({"gpus": RANKS}), Future(), fail_fast=True)
    call.lose(errors.WorkerLost(0, "a", "exit code 7"))
    failing = FailingCall(call, NOW)
    assert not failing.must_ask(NOW) and failing.due == NOW + FAILURE_GRACE_S
    assert not failing.is_ripe(NOW) and failing.is_ripe(failing.due)
    call.lose(errors.WorkerLost(1, "a", "exit code 7"), alone=True)
    assert failing.is_ripe(NOW) and failing.due == 0.0


# ---- on ranks ------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def eight() -> Iterator[ProcMesh]:
    with this_host().spawn_procs({"gpus": 8}, group=False) as mesh:
        yield mesh


def raise_on(rank: int, pause_s: float) -> None:
    import os

    if rank in (-1, int(os.environ["RANK"])):
        raise ValueError("bad shard")
    time.sleep(pause_s)


@pytest.mark.slow
def test_eight_ranks_that_fail_together_are_one_error_on_a_loaded_machine(
    eight: ProcMesh, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        "meshbook.controller.watched_calls.LONGEST_GRACE_S", 20.0
    )  # others may load the machine much more
    monkeypatch.setattr("meshbook.controller.watched_calls.FAILS_WITHIN_S", 1.0)
    spin = "import time\nend = time.monotonic() + 20\nwhile time.monotonic() < end: pass"
    loads = [subprocess.Popen([sys.executable, "-c", spin]) for _ in range(3)]
    try:
        for _ in range(10):
            with pytest.raises(errors.CallFailed) as failed:
                eight.execute(raise_on, -1, 0.0).get(30)
            assert sorted(failure.rank for failure in failed.value.failures) == [*range(8)]
    finally:
        for load in loads:
            load.kill()
            load.wait()


def raise_when_told(told: str, raises: str) -> None:
    from pathlib import Path

    with open(told) as pipe:
        pipe.read()
    Path(raises).touch()
    raise ValueError("told to")


def test_what_ranks_had_answered_is_here_before_their_states(eight: ProcMesh, tmp_path: Path) -> None:
    os.mkfifo(told := tmp_path / "told")
    controller, mesh = eight._controller, eight._mesh
    recovery = controller.ask(lambda: controller._dispatcher.groups_of(mesh))
    agent, rank = mesh.hosts[0].hello, eight.status()[0].pid
    assert agent is not None
    future = eight.slice(gpus=0).execute(raise_when_told, str(told), str(tmp_path / "raises"))
    assert isinstance(future, CallFuture)
    failed: Future[bool] = Future()
    with told.open("w"):  # opens when the rank does
        os.kill(agent.pid, signal.SIGSTOP)
    try:
        wait_until(lambda: (tmp_path / "raises").exists())
        wait_until(lambda: all(process_state(rank) == "S" for _ in range(20)))
        controller.ask(lambda: recovery.ask_states([0], 30, lambda states, now: failed.set_result(future.call.failed)))
        controller.ask(int)  # the question has gone out
    finally:
        os.kill(agent.pid, signal.SIGCONT)
    assert failed.get(30)
    with pytest.raises(errors.CallFailed, match="told to"):
        future.get(30)


def test_a_failure_is_told_while_the_others_sleep(eight: ProcMesh, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        "meshbook.controller.watched_calls.FAILURE_GRACE_S", 20.0
    )  # their states say that nothing follows
    with pytest.raises(errors.CallFailed) as failed:
        eight.execute(raise_on, 3, 60.0).get(30)
    assert [failure.rank for failure in failed.value.failures] == [3]
    eight.interrupt()
    eight.execute(int).get(30)


def test_a_cell_fails_that_is_sent_in_the_moment_in_which_a_rank_ends(
    mesh2: ProcMesh, monkeypatch: pytest.MonkeyPatch
) -> None:
    pid = mesh2.status()[1].pid

    def ending(head: bytes) -> object:
        """It stands between the look whether all ranks are there, and the sending."""
        os.kill(pid, signal.SIGKILL)
        wait_until(lambda: mesh2.lost)
        return place_head(head)

    place_head = controller.place_head
    monkeypatch.setattr(controller, "place_head", ending)
    running = mesh2.run("x = 1")
    monkeypatch.undo()
    with pytest.raises(errors.WorkerLost, match="rank 1"):
        running.get(20)
    mesh2.heal()
    mesh2.run("x = 2").get(20)
