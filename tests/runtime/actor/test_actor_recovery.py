"""Actors that wait in a collective for one that never comes: freed, and the groups work again."""

from __future__ import annotations

import time

import pytest
from collector import Collector
from learners import AsyncLearner, Learner
from patience import wait_until

from meshbook import ProcMesh
from meshbook.actor import ActorError, ActorMesh
from meshbook.actor.identity import ActorState
from meshbook.calls.output import Notice, OutputTarget
from meshbook.errors import CallInterrupted
from meshbook.mesh.driven import set_front_end
from meshbook.mesh.proc_view import ask, new_output_id

PROVE = "proof = torch.ones(1)\ndist.all_reduce(proof)\nint(proof)"


def is_idle(learners: ActorMesh, procs: ProcMesh) -> bool:
    states = ask(procs, list[ActorState], "actors", timeout_s=5)
    return all(not actor.doing for each in states.values() for actor in each)


@pytest.mark.parametrize("cls", [Learner, AsyncLearner])
def test_actors_that_wait_for_one_that_raised_are_freed(mesh4: ProcMesh, cls: type[Learner]) -> None:
    heard = Collector()
    set_front_end(output_source=lambda procs: OutputTarget(new_output_id(procs), heard))
    try:
        learners = mesh4.spawn("learners", cls)
        assert learners.step.call().get(30).values() == [4] * 4
        with pytest.raises(ActorError, match="rank 1 raised ValueError: bad shard"):
            learners.step.call(fails=1).get(30)
        wait_until(lambda: is_idle(learners, mesh4))
        notices = [event.text for event in heard.events if isinstance(event, Notice)]
        assert len(notices) == 1
        assert notices[0].startswith(
            "learners.step: rank 1 raised ValueError; ranks 0,2,3 wait in all_reduce (learners.py"
        )
        assert notices[0].endswith("which rank 1 never entered; freed")
    finally:
        set_front_end()
    assert mesh4.run(PROVE).get(30).values() == [4] * 4
    assert learners.step.call(times=1).get(30).values() == [4] * 4
    learners.stop().get(20)


def test_an_interrupt_frees_actors_that_wait_for_some_that_were_not_called(mesh4: ProcMesh) -> None:
    learners = mesh4.spawn("learners", Learner)
    assert learners.step.call().get(30).values() == [4] * 4
    waiting = learners.slice(gpus=slice(1, 4)).step.call()
    time.sleep(0.3)
    assert not waiting.done()
    waiting.cancel()
    with pytest.raises((CallInterrupted, ActorError)):
        waiting.get(30)
    wait_until(lambda: is_idle(learners, mesh4))
    time.sleep(0.3)  # the groups are compared when all have ended
    assert mesh4.run(PROVE).get(30).values() == [4] * 4
    assert learners.step.call().get(30).values() == [4] * 4
    learners.stop().get(20)


def test_actors_are_not_freed_while_others_may_still_come(mesh4: ProcMesh) -> None:
    learners, beside = mesh4.spawn("learners", Learner), mesh4.spawn("beside", Learner)
    cell = mesh4.slice(gpus=1).run("import time; time.sleep(0.5); dist.all_reduce(torch.ones(1))")
    with pytest.raises(ActorError, match="bad shard"):
        learners.step.call(fails=1).get(30)
    cell.get(30)
    wait_until(lambda: is_idle(learners, mesh4))
    assert mesh4.run(PROVE).get(30).values() == [4] * 4
    assert beside.step.call().get(30).values() == [4] * 4
