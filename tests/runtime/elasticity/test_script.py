"""A function of all ranks is called again from its last save on the ranks that are left."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

import meshbook
from meshbook import ProcMesh, elastic_script, this_host
from meshbook.controller import startup
from meshbook.errors import CallFailed, UsageError, WorkerLost


@pytest.fixture
def procs(clean_end: None) -> Iterator[ProcMesh]:
    with this_host().spawn_procs({"gpus": 3}, name="script") as procs:
        yield procs


STEPS, BATCH = 12, 6


def train(folder: str, kills: dict[int, int]) -> tuple[int, list[float]]:
    """Train by DDP, each rank its part of one global batch, and end ranks at steps, each once."""
    torch.manual_seed(0)
    model = DistributedDataParallel(torch.nn.Linear(4, 4))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    losses: list[float] = []
    state: dict[str, Any] = {"model": model, "optimizer": optimizer, "losses": losses, "step": 0}
    if os.path.isdir(folder):
        meshbook.restore(folder, state)
    begun = state["step"]
    rank, size = dist.get_rank(), dist.get_world_size()
    for step in range(begun, STEPS):
        if kills.get(step) == rank and not os.path.exists(mark := f"{folder}-{step}"):
            Path(mark).touch()
            os.kill(os.getpid(), signal.SIGKILL)
        batch = torch.randn(BATCH, 4, generator=torch.Generator().manual_seed(step))
        mine = batch.chunk(size)[rank]
        loss = (model(mine) - mine).square().sum() / batch.numel() * size
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        total = loss.detach() / size
        dist.all_reduce(total)
        losses.append(total.item())
        state["step"] = step + 1
        if step % 3 == 2:
            meshbook.save(folder, state, keep=2)
    return begun, losses


def test_it_goes_on_from_the_last_save(procs: ProcMesh, tmp_path: Path, capsys: Any) -> None:
    wanted = procs.execute(train, str(tmp_path / "undisturbed"), {}).get().values()[0][1]
    saves = tmp_path / "saves"
    told = elastic_script(train, str(saves), {1: 1, 7: 0}, procs=procs, save=saves).values()
    assert len(told) == 3
    for begun, losses in told:
        assert begun == 6 and losses == pytest.approx(wanted, abs=1e-5)
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].startswith("elastic: rank 1 ended (killed by SIGKILL); healed in ")
    assert lines[0].endswith(", restart 1 of 3, without a save")
    assert "rank 0 ended" in lines[1] and lines[1].endswith("restart 2 of 3 from save-2, step 6")
    assert lines[2:] == ["elastic: done after 2 restarts"]


def test_it_goes_on_with_fewer_ranks(procs: ProcMesh, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    wanted = procs.execute(train, str(tmp_path / "undisturbed"), {}).get().values()[0][1]
    monkeypatch.setattr(startup, "MAX_DEATHS", 0)
    saves = tmp_path / "saves"
    told = elastic_script(train, str(saves), {7: 2}, procs=procs, save=saves, min_ranks=2).values()
    assert len(told) == 2 and told[0][1] == pytest.approx(wanted, rel=1e-3)


def always_fail(what: str) -> None:
    if what == "raise" and dist.get_rank() == 1:
        raise ValueError("mine")
    if what == "end" and dist.get_rank() == 1:
        os._exit(3)
    if what == "sleep":
        time.sleep(60)
    dist.barrier()


def test_errors_of_the_function_and_too_many_restarts_end_it(procs: ProcMesh, tmp_path: Path, capsys: Any) -> None:
    with pytest.raises(CallFailed, match="ValueError: mine"):
        elastic_script(always_fail, "raise", procs=procs, save=tmp_path)
    assert capsys.readouterr().out == ""
    with pytest.raises(WorkerLost, match="exit code 3"):
        elastic_script(always_fail, "end", procs=procs, save=tmp_path, max_restarts=2)
    assert capsys.readouterr().out.count("restart") == 2
    procs.heal()
    threading.Timer(0.5, os.kill, (os.getpid(), signal.SIGINT)).start()
    with pytest.raises(KeyboardInterrupt):
        elastic_script(always_fail, "sleep", procs=procs, save=tmp_path)
    assert procs.run("rank").get(30).values() == [0, 1, 2]
    with pytest.raises(UsageError, match="whole mesh"):
        elastic_script(always_fail, "", procs=procs.slice(gpus=0), save=tmp_path)
    with pytest.raises(UsageError, match="min_ranks=4"):
        elastic_script(always_fail, "", procs=procs, save=tmp_path, min_ranks=4)
