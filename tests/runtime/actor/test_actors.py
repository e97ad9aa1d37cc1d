"""Actors, called from the process that drives the mesh."""

from __future__ import annotations

import asyncio
import inspect
import os
import pickle
import re
import signal
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from actor_classes import AsyncActor, Cleaner, Counter, Reserved, Sleeper
from collector import Collector
from patience import wait_until

import meshbook.actor
from meshbook import ProcMesh
from meshbook.actor import (
    Actor,
    ActorError,
    ActorStoppedError,
    ArgumentsError,
    Channel,
    MeshFailure,
    NoEndpointError,
    SupervisionError,
    UnhandledFault,
    as_endpoint,
    context,
    current_actor_name,
    current_size,
    endpoint,
)
from meshbook.actor.identity import ActorState, actor_table
from meshbook.calls.output import OutputTarget
from meshbook.errors import (
    CallInterrupted,
    CallTimeout,
    LayoutError,
    MeshStoppedError,
    SerializationError,
    UsageError,
)
from meshbook.mesh.driven import set_front_end
from meshbook.mesh.proc_view import new_output_id


def press_interrupt(when: Callable[[], bool]) -> threading.Thread:
    """Ctrl-C as soon as ``when()``."""

    def press() -> None:
        wait_until(when)
        time.sleep(0.1)
        os.kill(os.getpid(), signal.SIGINT)

    thread = threading.Thread(target=press)
    thread.start()
    return thread


# ---- calls -------------------------------------------------------------------------------------------------------


def test_each_actor_keeps_its_own_state(mesh4: ProcMesh) -> None:
    counters = mesh4.spawn("counters", Counter, 10)
    assert counters.add.call(1).get(20).values() == [11] * 4
    assert counters.slice(gpus=2).add.call_one(5, times=2).get(20) == 21
    assert counters.get.call().get(20).values() == [11, 11, 21, 11]
    assert counters.slice(gpus=slice(1, 3)).get.call().get(20).ranks == (1, 2)


def test_an_actor_is_not_kept_waiting_by_a_running_cell(mesh4: ProcMesh) -> None:
    cell = mesh4.run("import time; time.sleep(1.5); 'cell'")
    counters = mesh4.spawn("counters", Counter)
    assert counters.add.call(1).get(20).values() == [1] * 4
    assert not cell.done()
    assert cell.get(20).values() == ["cell"] * 4


def test_actors_of_a_process_run_side_by_side_and_each_on_a_thread_of_its_own(mesh4: ProcMesh) -> None:
    sleepers, counters = mesh4.spawn("sleepers", Sleeper), mesh4.spawn("counters", Counter)
    slow = sleepers.sleep.call(1.5)
    first, second = counters.thread.call().get(20), counters.thread.call().get(20)
    assert first == second
    assert not slow.done()
    assert slow.get(20).values() == ["awake"] * 4


def test_an_actor_knows_its_place_in_the_mesh_that_was_called(mesh4: ProcMesh) -> None:
    counters = mesh4.split(gpus=("dp", "tp"), tp=2).spawn("counters", Counter)
    assert counters.slice(dp=1).place.call().get(20).values() == [
        (0, {"tp": 0}, {"tp": 2}, "four.counters[2]"),
        (1, {"tp": 1}, {"tp": 2}, "four.counters[3]"),
    ]
    assert counters.slice(dp=1, tp=1).spawned_at.call_one().get(20) == {"dp": 1, "tp": 1}
    picked = counters.flatten("i").slice(i=[3, 0, 1]).place.call().get(20)
    assert [place[0] for place in picked.values()] == [0, 1, 2]


def test_choose_calls_one_of_them(mesh4: ProcMesh) -> None:
    counters = mesh4.spawn("counters", Counter)
    for _ in range(5):
        counters.add.choose(1).get(20)
    assert sum(counters.get.call().get(20).values()) == 5
    assert counters.place.choose().get(20)[2] == {"gpus": 4}


def test_a_stream_gives_answers_as_they_come(mesh4: ProcMesh) -> None:
    counters = mesh4.spawn("counters", Counter)
    counters.slice(gpus=3).add.call_one(7).get(20)
    stream = counters.get.stream()
    assert sorted(future.get(20) for future in stream) == [0, 0, 0, 7]
    failing = list(counters.fail.stream(1))
    outcomes = []
    for future in failing:
        try:
            outcomes.append(future.get(20))
        except ActorError as error:
            outcomes.append(str(error))
    assert sorted(outcomes)[0].startswith("Actor call counters.fail failed: rank 1 raised ValueError: bad shard")
    assert outcomes.count("fine") == 3


def test_messages_of_one_sender_are_handled_in_the_order_of_sending(mesh4: ProcMesh) -> None:
    actors = mesh4.spawn("async", AsyncActor)
    for index in range(200):
        actors.plainly.broadcast(str(index))
    assert actors.history.call().get(20).values() == [[str(index) for index in range(200)]] * 4


def test_futures_can_be_awaited(mesh4: ProcMesh) -> None:
    counters = mesh4.spawn("counters", Counter)

    async def main() -> tuple[Any, Any]:
        values, one = await asyncio.gather(_of(counters.add.call(1)), _of(counters.slice(gpus=0).get.call_one()))
        with pytest.raises(ActorError, match="bad shard"):
            await counters.fail.call()
        return values.values(), one

    assert asyncio.run(main()) == ([1, 1, 1, 1], 1)


async def _of(future: Any) -> Any:
    return await future


def test_large_arguments_and_results_travel_in_shared_memory(mesh4: ProcMesh) -> None:
    counters = mesh4.spawn("counters", Counter)
    sent = np.arange(1 << 20)
    for value in counters.give.call(sent).get(20).values():
        assert np.array_equal(value, sent)


def test_methods_that_are_no_endpoints_are_called_by_as_endpoint(mesh4: ProcMesh) -> None:
    counters = mesh4.spawn("counters", Counter, 5)
    assert as_endpoint(counters.reset).call(3).get(20).values() == [3] * 4
    assert as_endpoint(counters.get).call().get(20).values() == [3] * 4


def test_an_endpoint_may_answer_later_by_its_port(mesh4: ProcMesh) -> None:
    counters = mesh4.spawn("counters", Counter)
    assert counters.answer_later.call(4).get(20).values() == [8] * 4
    with pytest.raises(ActorError, match="KeyError: 'refused'"):
        counters.refuse_later.call().get(20)


def test_what_an_actor_prints_belongs_to_the_call_and_comes_before_its_answer(mesh4: ProcMesh) -> None:
    heard = Collector()
    set_front_end(output_source=lambda procs: OutputTarget(new_output_id(procs), heard))
    try:
        one = mesh4.spawn("counters", Counter).slice(gpus=1)
        one.say.call_one("hello").get(20)
        assert heard.text(1) == "hello\nend of hello"
    finally:
        set_front_end()


# ---- asyncio -----------------------------------------------------------------------------------------------------


def test_async_and_plain_endpoints_take_turns(mesh4: ProcMesh) -> None:
    actor = mesh4.slice(gpus=0).spawn("async", AsyncActor)
    slow = actor.slowly.call_one("a", 0.3)
    plain = actor.plainly.call_one("b")
    assert (slow.get(20), plain.get(20)) == ("a", "b")
    assert actor.history.call_one().get(20) == ["a begins", "a ends", "b"]


def test_concurrent_endpoints_do_not_keep_others_waiting(mesh4: ProcMesh) -> None:
    actors = mesh4.spawn("async", AsyncActor)
    waiting = [actors.wait.call() for _ in range(3)]
    assert actors.plainly.call("b").get(20).values() == ["b"] * 4
    actors.let_through.broadcast()
    for future in waiting:
        assert future.get(20).values() == [f"let through at {rank}" for rank in range(4)]


def test_an_endpoint_that_exits_fails_its_call_and_not_the_process(mesh4: ProcMesh) -> None:
    actors = mesh4.spawn("async", AsyncActor)
    with pytest.raises(ActorError, match="SystemExit"):
        actors.leave.call().get(20)
    assert actors.plainly.call("b").get(20).values() == ["b"] * 4


# ---- errors ------------------------------------------------------------------------------------------------------


def test_an_error_carries_the_remote_traceback_the_exception_and_the_other_results(mesh4: ProcMesh) -> None:
    counters = mesh4.spawn("counters", Counter)
    with pytest.raises(ActorError) as caught:
        counters.fail.call(1, 2).get(20)
    error = caught.value
    assert str(error).startswith("Actor call counters.fail failed: rank")
    assert "raised ValueError: bad shard" in str(error)
    assert isinstance(error.exception, ValueError)
    assert "actor_classes.py" in "".join(error.failures[0].traceback)
    assert set(error.partial.values()) <= {"fine"}
    assert str(pickle.loads(pickle.dumps(error))) == str(error)
    assert counters.get.call().get(20).values() == [0] * 4


@pytest.mark.parametrize(
    ("use", "kind", "text"),
    [
        (
            lambda c: c.add.call(),
            ArgumentsError,
            r"counters.add: missing a required argument: 'by'.*add\(by, times=...\)",
        ),
        (lambda c: c.add.call(1, speed=2), ArgumentsError, "unexpected keyword argument 'speed'"),
        (lambda c: c.ad.call(1), NoEndpointError, r'Counter has no endpoint ad; it has: add.*Did you mean "add"\?'),
        (lambda c: c.reset.call(), NoEndpointError, r"Counter.reset is a method, but no endpoint: decorate it"),
        (lambda c: c.add(1), UsageError, r"counters.add is an endpoint of actors: counters.add.call\(...\)"),
        (lambda c: c.get.call_one(), LayoutError, r"call_one calls one actor, .*counters.slice\(gpus=0\)"),
        (
            lambda c: c.add.call(threading.Lock()),
            SerializationError,
            "argument 1 is a _thread.lock, which cannot",
        ),
        (lambda c: c.slice(gpu=0), KeyError, "unknown axis"),
    ],
)
def test_wrong_use_is_told_to_the_caller_at_once(mesh4: ProcMesh, use: Any, kind: Any, text: str) -> None:
    counters = mesh4.spawn("counters", Counter)
    with pytest.raises(kind, match=text):
        use(counters)
    assert counters.get.call().get(20).values() == [0] * 4


def test_a_result_that_cannot_travel_is_an_error_of_the_call(mesh4: ProcMesh) -> None:
    counters = mesh4.spawn("counters", Counter)
    with pytest.raises(ActorError, match=r"the result of counters.give is a _thread.lock, which cannot be sent"):
        counters.give.call("lock").get(20)


def test_what_is_no_actor_class_cannot_be_spawned(mesh4: ProcMesh) -> None:
    with pytest.raises(UsageError, match=r"derives from meshbook\.actor\.Actor"):
        mesh4.spawn("no", dict)
    with pytest.raises(UsageError, match='has an endpoint "slice", but that is an attribute of every mesh of actors'):
        mesh4.spawn("no", Reserved)
    with pytest.raises(ArgumentsError, match=r"Counter.__init__: too many positional arguments"):
        mesh4.spawn("no", Counter, 1, 2, 3)


def test_a_timeout_names_the_silent_ranks(mesh4: ProcMesh) -> None:
    sleepers = mesh4.spawn("sleepers", Sleeper)
    future = sleepers.sleep.call(1.0)
    with pytest.raises(CallTimeout, match=r"sleepers.sleep: no answer from ranks 0-3 within 0.1 s"):
        future.get(0.1)
    assert future.get(20).values() == ["awake"] * 4


# ---- what nobody waits for -----------------------------------------------------------------------------------------


def test_a_failed_broadcast_is_an_error_at_the_next_use_once(mesh4: ProcMesh) -> None:
    counters = mesh4.spawn("counters", Counter)
    counters.fail.broadcast()
    with pytest.raises(UnhandledFault, match=r"counters.fail, which nobody waited for: ranks 0-3 raised ValueError"):
        wait_until(lambda: counters.get.call().get(20).values() != [0] * 4)
    assert counters.get.call().get(20).values() == [0] * 4


def test_a_hook_can_take_failures_that_nobody_handles(mesh4: ProcMesh, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[MeshFailure] = []
    monkeypatch.setattr(meshbook.actor, "unhandled_fault_hook", seen.append)
    counters = mesh4.spawn("counters", Counter)
    counters.fail.broadcast(1)
    wait_until(lambda: bool(seen))
    assert (seen[0].mesh_name, seen[0].ranks, seen[0].mesh) == ("counters", (1,), counters)
    assert "actor_classes.py" in seen[0].report()
    assert "bad shard" in seen[0].report()
    assert str(seen[0]).startswith("MeshFailure(crashed_ranks=[1], counters.fail: ")
    assert counters.get.call().get(20).values() == [0] * 4


def test_the_hook_is_told_of_processes_that_end(mesh2: ProcMesh, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[MeshFailure] = []
    monkeypatch.setattr(meshbook.actor, "unhandled_fault_hook", seen.append)
    counters = mesh2.spawn("counters", Counter)
    counters.slice(gpus=1).die.broadcast()
    wait_until(lambda: bool(seen))
    assert re.match(r"counters: rank 1 ended: .*SIGKILL", seen[0].report())


# ---- interrupts ----------------------------------------------------------------------------------------------------


class Waiting(Actor):
    """Raises errors whose code waits."""

    @endpoint
    def fail(self, method: str) -> None:
        code = f"class Slow(Exception):\n    def {method}(self, *_): import time; time.sleep(600)\n"
        exec(f"{code}raise Slow('the text')", {})


def test_an_interrupt_ends_the_text_of_an_error_that_waits(mesh4: ProcMesh) -> None:
    actors = mesh4.spawn("waiting", Waiting)
    future = actors.fail.call("__str__")
    with pytest.raises(CallTimeout):
        future.get(1)
    until = time.monotonic() + 20
    while not future.done() and time.monotonic() < until:
        mesh4.interrupt()
    with pytest.raises(ActorError, match="KeyboardInterrupt"):
        future.get(0)
    with pytest.raises(ActorError, match="the text"):  # which is told without the exception
        actors.fail.call("__reduce_ex__").get(20)
    assert mesh4.run("rank").get(20).values() == [0, 1, 2, 3]


@pytest.mark.parametrize("how", ["sleep", "wait_for_event", "spin"])
def test_an_interrupt_of_a_call_that_is_waited_for_reaches_plain_endpoints(mesh4: ProcMesh, how: str) -> None:
    sleepers = mesh4.spawn("sleepers", Sleeper)
    sleepers.initialized.get(20)
    future = getattr(sleepers, how).call(*([60] if how == "sleep" else []))
    thread = press_interrupt(lambda: True)
    with pytest.raises(CallInterrupted, match="ranks 0-3 stopped, all variables kept"):
        future.get(30)
    thread.join()
    assert set(sleepers.last.call().get(20).values()) == {
        {"sleep": "asleep", "wait_for_event": "waiting", "spin": "spinning"}[how]
    }


@pytest.mark.parametrize("how", ["slowly", "block"])
def test_an_interrupt_cancels_async_endpoints_and_those_that_block(mesh4: ProcMesh, how: str) -> None:
    actors = mesh4.spawn("async", AsyncActor)
    actors.initialized.get(20)
    future = actors.slowly.call("a", 60) if how == "slowly" else actors.block.call(60)
    thread = press_interrupt(lambda: True)
    with pytest.raises(CallInterrupted, match="ranks 0-3 stopped"):
        future.get(30)
    thread.join()
    began = "a begins" if how == "slowly" else "blocks"
    assert actors.history.call().get(20).values() == [[began]] * 4


def test_a_cancelled_call_that_waits_in_the_queue_never_runs(mesh4: ProcMesh) -> None:
    sleepers = mesh4.spawn("sleepers", Sleeper)
    slow = sleepers.sleep.call(0.6)
    queued = sleepers.sleep.call(30)
    queued.cancel()
    with pytest.raises(ActorError, match="cancelled before it started"):
        queued.get(20)
    assert slow.get(20).values() == ["awake"] * 4


# ---- ends ----------------------------------------------------------------------------------------------------------


def test_the_death_of_a_process_is_told_by_rank_and_cause_before_and_after_its_repair(mesh2: ProcMesh) -> None:
    counters, stopped = mesh2.spawn("counters", Counter), mesh2.spawn("stopped", Counter)
    dying = counters.slice(gpus=1)
    with pytest.raises(SupervisionError, match=r"rank 1 .*SIGKILL(.|\n)*the actors \"counters\" of rank 1") as caught:
        dying.die.call_one().get(20)
    assert caught.value.ranks == (1,)
    with pytest.raises(SupervisionError, match="rank 1"):
        counters.get.call().get(20)
    assert counters.slice(gpus=0).get.call_one().get(20) == 0
    stopped.stop().get(20)
    mesh2.heal()
    with pytest.raises(ActorStoppedError, match='the actors "counters" ended with rank 1, which was started again'):
        dying.get.call_one().get(20)
    assert counters.slice(gpus=0).get.call_one().get(20) == 0
    others = mesh2.slice(gpus=0).spawn("others", Counter)
    mesh2.stop()
    with pytest.raises(MeshStoppedError, match='mesh "two" was stopped') as gone:
        others.get.call()
    assert isinstance(gone.value, SupervisionError)
    others.stop().get(20)


def test_stopped_actors_clean_up_and_refuse_calls(mesh4: ProcMesh, tmp_path: Path) -> None:
    path = tmp_path / "log"
    cleaners = mesh4.spawn("cleaners", Cleaner, str(path))
    last = cleaners.ping.call()
    cleaners.stop("no longer needed").get(20)
    assert last.get(20).values() == ["pong"] * 4
    assert path.read_text() == "cleaned\n" * 4
    with pytest.raises(ActorStoppedError, match=r'the actors "cleaners" were stopped \(no longer needed\)') as stopped:
        cleaners.ping.call()
    assert isinstance(stopped.value, SupervisionError)
    assert (stopped.value.ranks, stopped.value.cause) == ((), "stopped")
    cleaners.stop().get(20)


def test_actors_are_stopped_at_the_end_of_an_async_block(mesh4: ProcMesh) -> None:
    async def main() -> None:
        async with mesh4.spawn("counters", Counter) as counters:
            assert (await counters.get.call()).values() == [0] * 4
        with pytest.raises(ActorStoppedError):
            counters.get.call()

    asyncio.run(main())


# ---- references ----------------------------------------------------------------------------------------------------


def test_references_are_small_and_equal_after_pickling(mesh4: ProcMesh) -> None:
    counters = mesh4.spawn("counters", Counter)
    part = counters.slice(gpus=slice(0, 2))
    again = pickle.loads(pickle.dumps(part))
    assert again == part
    assert len(pickle.dumps(part)) < 2000
    assert again.add.call(3).get(20).values() == [3, 3]


def test_ports_bring_values_to_whoever_made_them() -> None:
    port, receiver = Channel[int].open()
    asked = receiver.recv()
    port.send(1)
    port.send(2)
    port.exception(ValueError("three"))
    assert (asked.get(5), receiver.recv().get(5)) == (1, 2)
    third = receiver.recv()
    for _ in range(2):
        with pytest.raises(ValueError, match="three"):
            third.get(5)


def test_reprs_tell_what_can_be_called(mesh4: ProcMesh) -> None:
    counters = mesh4.spawn("counters", Counter)
    assert repr(counters).startswith('ActorMesh("counters", Counter, "four", gpus=4): add, ')
    assert repr(counters.add) == "<endpoint counters.add(by, times=...) of gpus=4>"
    assert counters.add.__doc__ == "Add, and return the sum."
    assert list(inspect.signature(counters.add).parameters) == ["by", "times"]
    assert {"add", "slice", "stop"} <= set(dir(counters))


def test_actors_are_listed_with_what_they_do(mesh2: ProcMesh) -> None:
    mesh2.spawn("counters", Counter).initialized.get(20)
    sleepers = mesh2.spawn("sleepers", Sleeper)
    slow = sleepers.slice(gpus=1).sleep.call_one(60)
    waiting = [sleepers.slice(gpus=1).last.call_one() for _ in range(2)]
    wait_until(lambda: any(state.queued == 2 and state.doing == ("sleep",) for state in mesh2.actors()))
    table = re.sub(r"for [\d.]+ s", "for 1 s", str(actor_table(mesh2.actors())))
    assert re.sub(r"py:\d+", "py:7", table).splitlines() == [
        "actors    class    ranks  doing",
        "counters  Counter  0,1    idle",
        "sleepers  Sleeper  0      idle",
        "                   1      sleep for 1 s (actor_classes.py:7), 2 wait",
    ]
    slow.cancel()
    assert [future.get(20) for future in waiting] == ["asleep"] * 2


def test_a_thousand_actors_make_a_short_table() -> None:
    states = [
        ActorState(rank, 1, "readers", "Reader", 0, ("read",), rank / 100, f"cell {rank % 20}, line 1", False)
        for rank in range(1000)
    ]
    lines = str(actor_table(states)).splitlines()
    assert len(lines) == 14
    assert all(len(line) < 100 for line in lines)
    assert lines[-1].endswith("and 400 more ranks")


def test_outside_of_actors_the_context_is_the_client() -> None:
    assert context().actor_instance.name == "root" and current_actor_name() == "client"
    assert current_size() == {}


def test_endpoints_are_plain_methods_of_the_object() -> None:
    assert Counter(1).add(2) == 3  # type: ignore[operator]

    class Local(Actor):
        @endpoint
        def both(self) -> int:
            return 7

    assert Local().both() == 7  # type: ignore[operator]
