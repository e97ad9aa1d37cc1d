"""Actors in the process that drives meshes."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from client_actor_classes import Adder, Backer, Ending, Guest, Leader, added
from patience import wait_until

from meshbook import ProcMesh, this_host, this_proc
from meshbook.actor import ActorError, ActorMesh, SupervisionError, context
from meshbook.actor.errors import CircularCallError
from meshbook.errors import UsageError


def test_an_actor_lives_in_this_process_and_has_its_globals() -> None:
    added.clear()
    adder = this_proc().spawn("adder", Adder, 3)
    assert adder.pid.call_one().get(20) == os.getpid()
    assert adder.add.call_one(2).get(20) == 5
    assert asyncio.run(_await(adder.add.call(1))).values() == [6]
    assert added == [2, 1]
    assert (len(this_proc()), this_proc().sizes) == (1, {})
    adder.stop().get(20)
    with pytest.raises(SupervisionError, match='"adder" were stopped'):
        adder.add.call_one(1)


async def _await(future: Any) -> Any:
    return await future


def test_arguments_and_results_are_copies() -> None:
    adder = this_proc().spawn("adder", Adder)
    mine = torch.ones(100_000)
    doubled = adder.double.call_one(mine).get(20)
    assert doubled.sum() == 200_000 and mine.sum() == 100_000
    adder.stop().get(20)


def test_what_it_raises_names_the_line_without_frames_of_ours() -> None:
    adder = this_proc().spawn("adder", Adder)
    with pytest.raises(ActorError, match=r"fail failed: rank 0 raised ValueError: bad shard \(client_actor_cl") as e:
        adder.fail.call_one().get(20)
    assert isinstance(e.value.exception, ValueError)
    assert "actor_runner" not in "".join(e.value.failures[0].traceback)
    adder.stop().get(20)


def test_a_cancelled_call_is_interrupted_where_it_runs() -> None:
    adder = this_proc().spawn("adder", Adder)
    adder.pid.call_one().get(20)
    sleeping = adder.sleep.call_one(60)
    adder_waits = adder.add.call_one(1)
    time.sleep(0.1)
    sleeping.cancel()
    with pytest.raises(ActorError, match="KeyboardInterrupt"):
        sleeping.get(20)
    assert adder_waits.get(20) == 1
    adder.stop().get(20)


def test_ranks_and_the_program_call_each_others_actors(mesh2: ProcMesh) -> None:
    here = this_proc().spawn("here", Adder)
    there = mesh2.spawn("there", Adder, 10)
    assert here.add_there.call_one(there, 5).get(20) == [15, 15]
    assert sorted(values for (values,) in there.add_there.call(here, 1).get(20).values()) == [1, 2]
    guest = mesh2.slice(gpus=1).spawn("host", Guest).spawn_at.call_one(this_proc()).get(20)
    assert isinstance(guest, ActorMesh) and guest.pid.call_one().get(20) == os.getpid()
    assert there.add_there.call(guest, 0).get(20).values() == [[100], [100]]
    here.stop().get(20)


def test_a_circle_within_the_program_is_refused() -> None:
    here, other = this_proc().spawn("here", Adder), this_proc().spawn("other", Backer)
    with pytest.raises(ActorError) as raised:
        other.ask.call_one(here, other).get(20)
    assert isinstance(raised.value.exception, CircularCallError)
    here.stop().get(20)
    other.stop().get(20)


def test_an_actor_here_is_told_of_what_it_has_spawned() -> None:
    procs = this_host().spawn_procs({"gpus": 2}, name="led", group=False)
    leader = this_proc().spawn("leader", Leader)
    assert leader.lead.call_one(procs, 4).get(20) == [4, 4]
    os.kill(procs.slice(gpus=1).evaluate("__import__('os').getpid()").get(20).item(), signal.SIGKILL)
    wait_until(lambda: leader.reports.call_one().get(20))
    (report,) = leader.reports.call_one().get(20)
    assert "followers" in report and "rank 1 ended: killed by SIGKILL" in report
    leader.stop().get(20)
    procs.stop()


@pytest.mark.some()
@pytest.mark.quick("program-kill")
@pytest.mark.parametrize("how", ["stop", "abort", "kill"])
@pytest.mark.parametrize("where", ["program", "rank"])
def test_an_actor_ends_itself(
    how: str, where: str, mesh2: ProcMesh, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    procs: Any = this_proc() if where == "program" else mesh2.slice(gpus=1)
    path = tmp_path / "cleaned"
    ending = procs.spawn("ending", Ending, str(path))
    if how == "kill":
        with pytest.raises(SupervisionError, match="had enough"):
            ending.end.call_one(how).get(20)
    else:
        assert ending.end.call_one(how).get(20) == "done"
    with pytest.raises(SupervisionError, match="had enough"):
        ending.who.call_one().get(20)
    if how == "kill":
        assert not path.exists()
    else:
        wait_until(lambda: path.exists() and path.read_text() != "")
        assert path.read_text() == ("None" if how == "stop" else "actor explicitly aborted due to: had enough")
    if how != "stop":
        seen: list[str] = []

        def is_told() -> bool:
            seen.append(capfd.readouterr().err)
            return "had enough" in "".join(seen)

        wait_until(is_told)


def test_an_instance_says_who_it_is(mesh2: ProcMesh, tmp_path: Path) -> None:
    here = this_proc().spawn("one", Ending, str(tmp_path / "a")).who.call_one().get(20)
    module = Ending.__module__
    assert here == (f"<root>.<{module}.Ending one>", "<root>", "one", "client", 1)
    there = mesh2.spawn("two", Ending, str(tmp_path / "b")).who.call().get(20).item(gpus=1)
    assert there == (f"<root>.<{module}.Ending two{{'gpus': 1/2}}>", "<root>", "two.two[1]", "two[1]", 2)
    me = context().actor_instance
    assert (str(me), me.name, me.creator, me.proc_id, len(me.proc), len(me.proc_mesh)) == (
        "<root>", "root", None, "client", 1, 1,
    )  # fmt: skip
    with pytest.raises(UsageError, match="only the actor that runs can end itself"):
        me.abort("never")
    with pytest.raises(UsageError, match="the process of the program itself"):
        this_proc().stop()


def test_actors_of_a_script_clean_up_at_its_end(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(
        "from meshbook import this_proc; from meshbook.actor import Actor, endpoint\n"
        "class Last(Actor):\n"
        "    @endpoint\n"
        "    async def ping(self): return 'pong'\n"
        "    def __cleanup__(self, error): print('cleaned', error)\n"
        "print(this_proc().spawn('last', Last).ping.call_one().get(20))\n"
    )
    done = subprocess.run([sys.executable, str(script)], capture_output=True, text=True, timeout=60)
    assert (done.stdout, done.stderr) == ("pong\ncleaned None\n", "")
