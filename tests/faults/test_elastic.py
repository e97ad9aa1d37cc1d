"""A training survives twenty ends of ranks and hosts, and its losses are those of one without."""

from __future__ import annotations

import os
import random
import signal
from pathlib import Path
from typing import Any

import pytest
from elastic_training import train

from meshbook import LocalLauncher, shutdown, start_hosts
from meshbook.controller import startup
from meshbook.distributed import Mesh

BATCHES, EVERY, KILLS, HOST_KILLS = 60, 5, 20, 3


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("seed", [7])
def test_twenty_ends_at_random_batches_change_no_loss(
    seed: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(startup, "MAX_DEATHS", 1000)  # a rank that ends so often is given up else
    chance = random.Random(seed)
    during_save = chance.randrange(1, BATCHES // EVERY) * EVERY  # the save has just begun
    others = [at for at in range(BATCHES) if at != during_save]
    plan = dict.fromkeys([during_save, *chance.sample(others, KILLS - 1)], "rank")
    plan.update(dict.fromkeys(chance.sample([at for at in plan if at != during_save], HOST_KILLS), "host"))
    loops: list[Any] = []
    hosts = start_hosts({"hosts": 2}, LocalLauncher(separate_hosts=True))
    with hosts.spawn_procs({"gpus": 2}, name="killed", owns_hosts=True) as procs:
        mesh = Mesh(procs)
        undisturbed = train(mesh, tmp_path / "undisturbed", batches=BATCHES, every=EVERY)
        left = dict(plan)

        def kill(loop: Any) -> None:
            loops[:] = [loop]
            kind = left.pop(loop.done, None)
            if kind == "rank":
                os.kill(procs.status()[chance.randrange(4)].pid, signal.SIGKILL)
            elif kind == "host":
                agent = chance.choice(procs._mesh.hosts).hello
                assert agent is not None
                os.kill(agent.pid, signal.SIGKILL)

        losses = train(mesh, tmp_path / "saves", kill, batches=BATCHES, every=EVERY)
        assert not left and not procs.lost
    shutdown()
    assert losses == pytest.approx(undisturbed, abs=1e-5)
    (loop,) = loops
    told = capsys.readouterr().out.splitlines()
    assert loop.recoveries == KILLS == sum("healed in" in line for line in told)
    assert sum("ranks " in line for line in told) >= HOST_KILLS
