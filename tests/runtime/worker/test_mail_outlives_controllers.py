"""Ranks go on calling each other while their controller is gone, and after the next one has come."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator

import psutil
import pytest
from controllers import Zygote, alone

SPAWN = """
import mail_ranks
from mail_ranks import There
from meshbook.shape.members import members_of
from meshbook import LocalLauncher, start_hosts
from meshbook.calls.mailboxes import CONTROLLER, CONTROLLER_MESH
mesh = start_hosts({"hosts": 2}, LocalLauncher(separate_hosts=True)).spawn_procs({"gpus": 2}, name="kept", device="cpu")
mesh.execute(mail_ranks.open_desk, 7).get(60)
mesh.execute(mail_ranks.keep_talking, There(mesh.id, members_of(mesh), 7)).get(60)
while min(rounds for rounds, _ in mesh.execute(mail_ranks.talked).get(30).values()) < 20:
    time.sleep(0.05)
mesh._controller.mailboxes.open(9, lambda call, load_args, reply: say("called"))
mesh.slice(hosts=0, gpus=1).execute(mail_ranks.keep_talking, There(CONTROLLER_MESH, CONTROLLER, 9)).get(60)
time.sleep(60)
"""

ATTACH = """
import mail_ranks
from meshbook.shape.members import members_of
kept = attach("kept")
mesh = kept.mesh("kept")
before = mesh.execute(mail_ranks.talked).get(30).values()
say("before", json.dumps([rounds for rounds, _ in before]))
time.sleep(1)
after = mesh.execute(mail_ranks.talked).get(30).values()
say("after", json.dumps([rounds for rounds, _ in after]))
say("errors", json.dumps([errors for _, errors in after]))
mesh.respawn(3)
mesh.slice(hosts=1, gpus=1).execute(mail_ranks.open_desk, 7).get(60)
there = mail_ranks.There(mesh.id, members_of(mesh), 7)
say("again", json.dumps(mesh.slice(hosts=0, gpus=0).execute(mail_ranks.ask, there, "echo", 5).get(60).values()))
mesh.stop()
"""


@pytest.fixture
def zygote() -> Iterator[Zygote]:
    with alone() as zygote:
        yield zygote


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_ranks_call_on_while_their_controller_is_killed_and_replaced(
    zygote: Zygote, watch: Callable[[Iterable[psutil.Process]], None]
) -> None:
    first = zygote.start("import json, time\n" + SPAWN)
    first.expect("called")
    watch(first.family())
    first.kill()
    time.sleep(0.5)
    second = zygote.start("import json, time\n" + ATTACH)
    before, after = second.expect_json("before"), second.expect_json("after")
    assert all(rounds >= 20 for rounds in before)
    assert all(later > earlier for later, earlier in zip(after, before, strict=True))
    lost, *others = sorted(second.expect_json("errors"), key=lambda errors: -len(errors))
    assert others == [[], [], []]
    assert "the process that controls the mesh has ended" in lost[0]
    assert second.expect_json("again") == [{str(rank): 5 for rank in range(4)}]
    second.wait(60)
