"""Actors that call actors, spawn them and own them; references and ports in messages."""

from __future__ import annotations

import inspect
import os
import re
import signal
import threading
from collections.abc import Callable
from itertools import product

import pytest
from actor_classes import Caller, Counter, Delegate, Parent, PingPong, Relay, Sleeper
from collector import Collector
from patience import wait_until

import meshbook.actor
from meshbook import ProcMesh
from meshbook.actor import ActorError, ArgumentsError, Channel, MeshFailure, send
from meshbook.actor.classes import EndpointInfo, params_of
from meshbook.calls.output import OutputTarget
from meshbook.errors import CallInterrupted
from meshbook.mesh.driven import set_front_end
from meshbook.mesh.proc_view import new_output_id
from meshbook.monarch import get_or_spawn_controller


def test_an_actor_calls_actors_of_other_processes(mesh4: ProcMesh) -> None:
    counters = mesh4.spawn("counters", Counter, 10)
    relays = mesh4.spawn("relays", Relay, counters)
    assert relays.slice(gpus=1).add_everywhere.call_one(1).get(20) == [11] * 4
    assert relays.slice(gpus=0).add_async.call_one(1).get(20) == 48
    assert counters.get.call().get(20).values() == [12] * 4


def test_messages_of_one_actor_to_another_keep_their_order(mesh4: ProcMesh) -> None:
    counters, relays = mesh4.spawn("counters", Counter), mesh4.spawn("relays", Relay)
    answers = relays.add_one.call(counters.slice(gpus=2), 1, 50).get(60).values()
    assert all(answer == sorted(answer) for answer in answers)
    assert sorted(value for answer in answers for value in answer) == list(range(1, 201))


def test_references_come_back_as_results(mesh4: ProcMesh) -> None:
    counters = mesh4.spawn("counters", Counter, 3)
    relay = mesh4.slice(gpus=3).spawn("relay", Relay, counters)
    part = relay.part.call_one().get(20)
    assert part == counters.slice(gpus=slice(0, 2))
    assert part.get.call().get(20).values() == [3, 3]


def test_errors_of_actors_pass_through_the_actors_that_called_them(mesh4: ProcMesh) -> None:
    relay = mesh4.slice(gpus=0).spawn("relay", Relay, mesh4.spawn("counters", Counter))
    with pytest.raises(
        ActorError,
        match=r"relay.fail_there failed: rank 0 raised ActorError: Actor call counters.fail failed: rank.*bad shard",
    ):
        relay.fail_there.call_one().get(20)
    with pytest.raises(ActorError, match=r"ArgumentsError: counters.add: too many positional arguments"):
        relay.wrong.call_one().get(20)


def test_prints_of_actors_that_actors_call_belong_to_the_calling_cell(mesh4: ProcMesh) -> None:
    heard = Collector()
    set_front_end(output_source=lambda procs: OutputTarget(new_output_id(procs), heard))
    try:
        relay = mesh4.slice(gpus=0).spawn("relay", Relay, mesh4.spawn("counters", Counter).slice(gpus=2))
        relay.say_there.call_one("hello").get(20)
        wait_until(lambda: heard.text(2) == "hello\nend of hello")
    finally:
        set_front_end()


@pytest.mark.parametrize("how", ["wait_there", "wait_there_plainly"])
def test_an_interrupt_reaches_the_actors_that_are_called_by_actors(mesh4: ProcMesh, how: str) -> None:
    sleepers = mesh4.slice(gpus=slice(1, 3)).spawn("sleepers", Sleeper)
    relay = mesh4.slice(gpus=0).spawn("relay", Relay)
    future = getattr(relay, how).call_one(sleepers)
    wait_until(lambda: [state.doing for state in mesh4.actors()].count(("sleep",)) == 2)
    timer = threading.Timer(0.5, os.kill, [os.getpid(), signal.SIGINT])
    timer.start()
    with pytest.raises(CallInterrupted, match="rank 0 stopped"):
        future.get(30)
    timer.join()
    assert sleepers.last.call().get(20).values() == ["asleep"] * 2


def test_an_actor_spawns_actors_beside_it_and_on_other_processes(mesh4: ProcMesh) -> None:
    parents = mesh4.spawn("parents", Parent)
    assert parents.spawn_beside.call(7).get(20).values() == [[8]] * 4
    children = parents.slice(gpus=0).spawn_on.call_one(mesh4.slice(gpus=slice(2, 4))).get(20)
    assert children.add.call(1).get(20).values() == [6, 6]
    assert children.ranks == (2, 3)


@pytest.mark.parametrize("hosts", ["mesh4", "mesh2x2"])
def test_two_actors_throw_a_ball_and_report_to_the_notebook(request: pytest.FixtureRequest, hosts: str) -> None:
    mesh: ProcMesh = request.getfixturevalue(hosts)
    left = mesh.select([0]).spawn("left", PingPong)
    right = mesh.select([3]).spawn("right", PingPong)
    port, receiver = Channel[list[int]].open()
    right.join.call_one(left, port).get(20)
    left.start.call_one(right, 100, port).get(20)
    assert receiver.recv().get(20) == list(range(100, -1, -2))
    assert left.thrown.call_one().get(20) == list(range(99, 0, -2))


def test_a_port_brings_the_values_of_each_sender_in_order(mesh4: ProcMesh) -> None:
    relays = mesh4.spawn("relays", Relay)
    port, receiver = Channel[tuple[int, int]].open()
    relays.send_many.broadcast(port, 100)
    got = [receiver.recv().get(20) for _ in range(400)]
    for rank in range(4):
        assert [index for sender, index in got if sender == rank] == list(range(100))


def test_send_has_all_answers_sent_to_a_port(mesh4: ProcMesh) -> None:
    counters = mesh4.spawn("counters", Counter, 1)
    port, receiver = Channel[int].open()
    send(counters.add, (1,), {"times": 2}, port)
    assert [receiver.recv().get(20) for _ in range(4)] == [3] * 4
    send(counters.add, (1,), {}, port, selection="choose")
    assert receiver.recv().get(20) == 4
    send(counters.fail, (), {}, port, selection="choose")
    with pytest.raises(ValueError, match="bad shard"):
        receiver.recv().get(20)


def test_a_response_port_can_be_passed_on(mesh4: ProcMesh) -> None:
    counters = mesh4.spawn("counters", Counter)
    delegates = mesh4.slice(gpus=0).spawn("delegates", Delegate, counters.slice(gpus=2))
    assert delegates.ask.call_one(4).get(20) == 8


def test_a_failure_that_no_owner_handles_reaches_the_notebook(mesh4: ProcMesh, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[MeshFailure] = []
    monkeypatch.setattr(meshbook.actor, "unhandled_fault_hook", seen.append)
    for name, handles in (("heedful", True), ("parent", False)):
        parent = mesh4.slice(gpus=1).spawn(name, Parent, handles=handles)
        parent.spawn_beside.call_one(0).get(20)
        parent.break_child.call_one().get(20)
        wait_until(lambda parent=parent: parent.reports.call_one().get(20) == ["child (1,) child.fail"])  # type: ignore[misc]
    wait_until(lambda: bool(seen))
    assert [(each.mesh_name, each.what, each.ranks) for each in seen] == [("parent", "child.fail", (1,))]


@pytest.mark.parametrize("how", ["plainly", "waiting", "late"])
def test_actors_that_would_wait_for_each_other_for_ever_are_told(mesh4: ProcMesh, how: str) -> None:
    callers = mesh4.spawn("callers", Caller)
    a, b, c = (callers.slice(gpus=gpu) for gpu in range(3))
    assert getattr(a, how).call_one([b, c]).get(20) == "end"
    with pytest.raises(ActorError, match=rf"CircularCallError: callers.{how} waits for this call of callers"):
        getattr(a, how).call_one([b, c, a]).get(20)
    with pytest.raises(ActorError, match="CircularCallError"):
        getattr(a, how).call_one([a]).get(20)
    assert a.beside.call_one([b, a, b, a]).get(20) == "end"


def test_an_endless_recursion_of_calls_ends_with_an_error(mesh4: ProcMesh) -> None:
    callers = mesh4.spawn("callers", Caller)
    with pytest.raises(ActorError, match=r"CallsTooDeepError: callers.endlessly is the last of 100 calls"):
        callers.slice(gpus=0).endlessly.call_one(callers.slice(gpus=0), callers.slice(gpus=1)).get(60)


# ---- processes that actors ask for -----------------------------------------------------------------------------------


def test_there_is_one_actor_of_a_name_in_the_session(mesh4: ProcMesh) -> None:
    one = get_or_spawn_controller("registry", Counter, 5).get(60)
    assert one.add.call_one(1).get(20) == 6
    parents = mesh4.spawn("parents", Parent)
    assert sorted(parents.register.call("registry").get(20).values()) == [7, 8, 9, 10]
    assert get_or_spawn_controller("registry", Counter, 5).get(60) == one
    one.stop().get(20)
    assert get_or_spawn_controller("registry", Counter, 5).get(60).add.call_one(1).get(20) == 6


def test_an_actor_starts_processes_and_spawns_actors_on_them(mesh4: ProcMesh) -> None:
    parent = mesh4.slice(gpus=2).spawn("parent", Parent)
    workers, pids = parent.start_processes.call_one(2).get(60)
    assert workers.add.call(1).get(20).values() == [101, 101]
    assert workers.pid.call().get(20).values() == pids
    assert not set(pids) & {status.pid for status in mesh4.status()}


def test_a_mesh_of_processes_comes_back_as_what_it_was(mesh4: ProcMesh) -> None:
    parent = mesh4.slice(gpus=2).spawn("parent", Parent)
    back = parent.echo.call_one(mesh4.slice(gpus=slice(1, 3))).get(20)
    assert isinstance(back, ProcMesh)
    assert back.ranks == (1, 2)
    assert back.run("rank").get(20).values() == [1, 2]


# ---- across hosts ----------------------------------------------------------------------------------------------------


def test_actors_of_other_hosts_are_called_as_those_of_this_one(mesh2x2: ProcMesh) -> None:
    counters = mesh2x2.spawn("counters", Counter, 10)
    relays = mesh2x2.spawn("relays", Relay, counters)
    assert relays.add_everywhere.call(1).get(30).values()[0] is not None
    assert counters.get.call().get(20).values() == [14] * 4
    answers = relays.add_one.call(counters.slice(hosts=1, gpus=0), 1, 20).get(60).values()
    assert sorted(value for answer in answers for value in answer) == list(range(15, 95))
    parent = mesh2x2.slice(hosts=0, gpus=0).spawn("parent", Parent)
    children = parent.spawn_on.call_one(mesh2x2.slice(hosts=1)).get(20)
    assert children.add.call(1).get(20).values() == [6, 6]


def test_an_actor_on_one_host_is_told_of_deaths_on_another(mesh2x2: ProcMesh) -> None:
    parent = mesh2x2.slice(hosts=0, gpus=0).spawn("parent", Parent)
    children = parent.spawn_on.call_one(mesh2x2.slice(hosts=1)).get(20)
    children.slice(gpus=1).die.broadcast()
    wait_until(lambda: parent.reports.call_one().get(20) == ["children (3,) children"])
    assert children.slice(gpus=0).add.call_one(1).get(20) == 6


@pytest.mark.parametrize(
    "method",
    [
        lambda: None,
        lambda a, b=1: None,
        lambda a, /, *rest: None,
        lambda a=1, *, speed: None,
        lambda a, *, speed=1, **others: None,
    ],
    ids=lambda method: str(inspect.signature(method)),
)
def test_arguments_are_refused_as_python_would(method: Callable[..., None]) -> None:
    info = EndpointInfo("step", params=params_of(method, skip=0))
    for args, kwargs in product(((), (1,), (1, 2), (1, 2, 3)), ({}, {"speed": 1})):
        try:
            inspect.signature(method).bind(*args, **kwargs)
        except TypeError as error:
            with pytest.raises(ArgumentsError, match=re.escape(str(error))):
                info.check("cars", args, kwargs)
        else:
            info.check("cars", args, kwargs)
