"""References to actors, ports and processes mean the same ones when ranks get other numbers, or fail at once."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator

import pytest
from named_actors import Asker, Named
from patience import kill, wait_until

from meshbook import ProcMesh, this_host
from meshbook.actor import ActorError, SupervisionError
from meshbook.actor.errors import ActorsLeftError
from meshbook.actor.router import router_for
from meshbook.calls.call import CallRequest
from meshbook.errors import LayoutError, RanksLeft
from meshbook.monarch import get_or_spawn_controller
from meshbook.shape.members import GONE, Members, Region, ranks_now, step_of
from meshbook.values.pickling import dumps


@pytest.fixture
def mesh3(clean_end: None) -> Iterator[ProcMesh]:
    with this_host().spawn_procs({"gpus": 3}, name="three", device="cpu") as mesh:
        yield mesh


def test_moves_lead_from_any_generation_to_the_last() -> None:
    moves = (step_of({0: 0, 2: 1, 3: 2}, 4), step_of({0: 0, 1: 2, 2: 3}, 3))
    assert ranks_now(moves, 0, range(4)) == [0, GONE, 2, 3]
    assert ranks_now(moves, 1, range(3)) == [0, 2, 3]
    assert ranks_now(moves, 2, [1]) == ranks_now(moves, -1, [1]) == [1]


def test_references_mean_the_same_actors_after_a_rank_has_left(mesh3: ProcMesh, mesh2: ProcMesh) -> None:
    named = mesh3.spawn("named", Named)
    ports = named.open.call().get(30).values()
    asker = mesh3.slice(gpus=0).spawn("asker", Asker, named, ports)
    elsewhere = mesh2.slice(gpus=1).spawn("elsewhere", Asker, named, ports)
    for one in (asker, elsewhere):
        assert one.ask.call_one(2).get(30) == 2
    reference = named.slice(gpus=[0, 2])
    kill(mesh3, 1)
    smaller = mesh3.shrink()
    assert reference.place.call().get(30).values() == [(0, 0), (2, 1)]
    assert named.slice(gpus=2).who.call_one().get(30) == 2
    assert [one.ask.call_one(2).get(30) for one in (asker, elsewhere)] == [2, 2]
    named.slice(gpus=2).who.broadcast()
    elsewhere.send.call_one(2, "from afar").get(30)
    assert named.slice(gpus=2).received.call_one().get(30) == "from afar"
    ports[2].send("from here")
    assert named.slice(gpus=2).received.call_one().get(30) == "from here"
    for call in (named.slice(gpus=1).who.call_one, named.who.call, named.who.broadcast):
        with pytest.raises(ActorsLeftError, match=r"of rank 1 .* left when the mesh shrank"):
            call()
    for one in (asker, elsewhere):
        with pytest.raises(ActorError, match="ActorsLeftError"):
            one.ask.call_one(1).get(30)
    with pytest.raises(RanksLeft):
        ports[1].send("nobody")
    with pytest.raises(LayoutError):
        mesh3.run("1")
    later = smaller.spawn("later", Named)
    assert later.who.call().get(30).values() == [0, 1]
    named.stop().get(30)
    assert smaller.grow(gpus=1).sizes == {"gpus": 3}


def test_references_mean_the_same_actors_after_growth_on_two_axes(clean_end: None) -> None:
    with this_host().spawn_procs({"dp": 2, "gpus": 1}, name="grid", device="cpu") as mesh:
        named = mesh.spawn("named", Named)
        asker = mesh.slice(dp=0).spawn("asker", Asker, named.slice(dp=1), [])
        assert named.who.call().get(30).values() == [0, 1]
        assert asker.ask_all.call_one().get(30) == [1]  # both are there: a mesh with busy ranks does not grow
        grown = mesh.grow(gpus=1)
        assert grown.sizes == {"dp": 2, "gpus": 2}
        values = named.place.call().get(30)
        assert (values.values(), values.sizes) == ([(0, 0), (1, 1)], {"dp": 2, "gpus": 1})
        assert asker.ask_all.call_one().get(30) == [1]
        assert len(grown.spawn("all", Named).who.call().get(30).values()) == 4


def test_who_owns_actors_is_not_told_of_deaths_when_ranks_get_other_numbers(mesh3: ProcMesh) -> None:
    asker = mesh3.slice(gpus=2).spawn("owner", Asker, None, [])
    assert asker.spawn.call_one(mesh3.slice(gpus=[0, 2])).get(30) == [0, 1]
    kill(mesh3, 1)
    smaller = mesh3.shrink()
    assert asker.told.call_one().get(30) == []
    assert asker.ask_mine.call_one().get(30) == [0, 1]
    kill(smaller, 0)
    wait_until(lambda: asker.told.call_one().get(30))


def test_a_call_to_ranks_that_are_no_more_is_answered_at_once(mesh3: ProcMesh) -> None:
    mesh = mesh3._mesh
    outside: Members = Region.build(7, [])
    began = time.monotonic()
    with pytest.raises(LayoutError):
        mesh3._controller.call(mesh, CallRequest("run_cell", outside, dumps(((), {}), what="nobody"), "nobody")).get(20)
    assert time.monotonic() - began < 10
    assert mesh3._controller.open_calls(mesh.id) == []


def test_the_one_actor_of_a_name_is_made_anew_when_its_process_has_ended(clean_end: None) -> None:
    first = get_or_spawn_controller("one", Named).get(60)
    pid = router_for(first._group.session)._controller._dispatcher.meshes[first._group.mesh].workers[0].pid
    os.kill(pid, signal.SIGKILL)
    wait_until(lambda: _is_lost(first))
    assert get_or_spawn_controller("one", Named).get(60).who.call_one().get(30) == 0


def _is_lost(actors: Named) -> bool:
    try:
        actors.who.call_one().get(30)
    except SupervisionError:
        return True
    return False
