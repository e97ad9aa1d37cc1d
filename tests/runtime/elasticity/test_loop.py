"""A loop of training goes on when ranks end, and each batch counts once."""

from __future__ import annotations

import itertools
import os
import re
import signal
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from elastic_training import kill_once, relative, train
from far_hosts import MovedLauncher
from patience import kill
from torch.utils.data import DataLoader, TensorDataset

import meshbook
from meshbook import ProcMesh, start_hosts, this_host
from meshbook.controller import startup
from meshbook.distributed import Mesh, TensorLost
from meshbook.elasticity import loop as elastic_loop
from meshbook.errors import CrashLoopError, UsageError, WorkerLost


@pytest.fixture
def mesh(clean_end: None) -> Iterator[Mesh]:
    with this_host().spawn_procs({"gpus": 3}, name="elastic") as procs:
        yield Mesh(procs)


@pytest.fixture
def undisturbed(mesh: Mesh, tmp_path: Path) -> list[float]:
    return train(mesh, tmp_path / "undisturbed")


@pytest.mark.parametrize("is_compiled", [False, True])
def test_each_batch_counts_once(
    mesh: Mesh, undisturbed: list[float], is_compiled: bool, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    seen: list[int] = []
    trouble = kill_once(mesh.procs, {6: 2, 8: 0, 13: 1})
    losses = train(mesh, tmp_path / "saves", trouble, is_compiled=is_compiled, seen=seen)
    assert losses == pytest.approx(undisturbed, abs=1e-5)
    lines = [line for line in capsys.readouterr().out.splitlines() if "the save of batch 8 failed" not in line]
    told = r"elastic: rank (\d) ended \(killed by SIGKILL\) at batch (\d+); healed in \S+ s, back to the save of batch "
    found = [re.match(told + r"(\d+)(?:, repeating (\d+) batch(es)?)?$", line) for line in lines]
    numbers = [tuple(int(each or 0) for each in match.groups()[:4]) for match in found if match]
    assert [(rank, at) for rank, at, _, _ in numbers] == [(2, 6), (0, 8), (1, 13)], lines
    assert all(back % 4 == 0 and at - back == repeated for _, at, back, repeated in numbers)
    begins, ends = [0, *(back for _, _, back, _ in numbers)], [*(at for _, at, _, _ in numbers), 19]
    assert seen == [each for begin, end in zip(begins, ends, strict=True) for each in range(begin, end + 1)]
    assert not mesh.procs.lost


def test_failures_that_are_seen_late_count_all_the_same(mesh: Mesh, tmp_path: Path) -> None:
    def run(trouble: Any) -> float:
        total = meshbook.zeros(3, mesh=mesh)
        batches = meshbook.stream([torch.full((3,), float(number)) for number in range(10)], mesh)
        loop = meshbook.elastic(batches, {"total": total}, save=tmp_path, every=4)
        for x in loop:
            with loop.attempt():  # nothing here waits for the ranks
                trouble(loop)
                total.add_(x)
        return float(total.sum())

    assert run(lambda loop: None) == 3 * 45.0
    assert run(kill_once(mesh.procs, {2: 1, 9: 0})) == 3 * 45.0


def test_numbers_in_the_state_go_back_with_it(mesh: Mesh, tmp_path: Path) -> None:
    class Numbers:
        """A source of batches that are on no mesh."""

        at = 0

        def __iter__(self) -> Iterator[int]:
            while self.at < 8:
                self.at += 1
                yield self.at

        def state_dict(self) -> dict[str, int]:
            return {"at": self.at}

        def load_state_dict(self, state: Any) -> None:
            self.at = state["at"]

    state: dict[str, Any] = {"total": 0, "x": meshbook.ones(3, mesh=mesh)}
    end_one = kill_once(mesh.procs, {6: 1})
    loop = meshbook.elastic(Numbers(), state, save=tmp_path, every=4)
    for number in loop:
        with loop.attempt(), loop.attempt():  # as in a cell whose body has a block of its own
            state["total"] += number
            end_one(loop)
            state["x"].add_(1).sum().item()
    assert loop.done == 8 and loop.recoveries == 1
    assert state["total"] == 36 and state["x"].tolist() == [9.0] * 3


def test_a_rank_that_ends_during_a_recovery_begins_another(
    mesh: Mesh, undisturbed: list[float], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    restore = elastic_loop.restore

    def end_another(*args: Any) -> Any:
        monkeypatch.undo()
        kill(mesh.procs, 0)
        return restore(*args)

    monkeypatch.setattr(elastic_loop, "restore", end_another)
    losses = train(mesh, tmp_path / "saves", kill_once(mesh.procs, {6: 2}))
    assert losses == pytest.approx(undisturbed, abs=1e-5)
    (told,) = capsys.readouterr().out.splitlines()
    assert told.startswith("elastic: rank 0 ended") and told.endswith("repeating 2 batches")


def test_a_mesh_that_cannot_be_healed_becomes_smaller(
    mesh: Mesh, undisturbed: list[float], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    monkeypatch.setattr(startup, "MAX_DEATHS", 0)
    mine = meshbook.ones(3, mesh=mesh)
    assert mine.sum().item() == 3.0
    losses = train(mesh, tmp_path / "saves", kill_once(mesh.procs, {6: 1, 14: 1}), min_ranks=1)
    assert relative(losses, undisturbed) < 1e-3
    assert mesh.shape == (1,) and len(mesh.procs.base()) == 1
    told = capsys.readouterr().out.splitlines()
    assert "goes on with gpus=2, back to the save of batch 4, repeating 2 batches" in told[0]
    assert "goes on with gpus=1" in told[1]
    with pytest.raises(TensorLost, match=r"made before the mesh changed its size.*meshbook\.elastic"):
        mine.sum().item()
    monkeypatch.undo()
    mesh.procs.grow(gpus=1)
    mesh.follow(mesh.procs.base())
    losses = train(mesh, tmp_path / "healed", kill_once(mesh.procs, {6: 1}))
    assert mesh.shape == (2,) and relative(losses, undisturbed) < 1e-3


def test_fewer_ranks_than_wanted_end_the_loop(mesh: Mesh, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(startup, "MAX_DEATHS", 0)
    for options in ({}, {"min_ranks": 3}):
        with pytest.raises(CrashLoopError):
            train(mesh, tmp_path, kill_once(mesh.procs, {2: 1}), **options)
        mesh.procs.heal(force=True)


def test_a_batch_that_fails_again_and_again_ends_the_loop(mesh: Mesh, tmp_path: Path) -> None:
    seen: list[int] = []

    def kill(loop: Any) -> None:
        if loop.done == 5:
            os.kill(mesh.procs.status()[len(seen) % 3].pid, signal.SIGKILL)

    with pytest.raises(WorkerLost):
        train(mesh, tmp_path, kill, seen=seen)
    assert seen.count(5) == elastic_loop.FAILURES
    mesh.procs.heal()


def test_errors_of_the_program_leave_the_loop_as_they_are(mesh: Mesh, tmp_path: Path, capsys: Any) -> None:
    seen: list[int] = []

    def fail(loop: Any) -> None:
        if loop.done == 3:
            raise KeyError("mine")

    with pytest.raises(KeyError, match="mine") as raised:
        train(mesh, tmp_path / "one", fail, seen=seen)
    assert seen == [0, 1, 2, 3]
    names = [entry.name for entry in raised.traceback]
    assert names[-2:] == ["train", "fail"]  # and no frame of ours

    def wrong(loop: Any) -> None:
        meshbook.ones(3, mesh=mesh)[torch.tensor([7])].sum().item()

    with pytest.raises(meshbook.DeviceMeshError, match="index 7"):
        train(mesh, tmp_path / "two", wrong)
    assert capsys.readouterr().out == ""


def test_an_interrupt_ends_the_loop_and_leaves_the_mesh(mesh: Mesh, tmp_path: Path) -> None:
    def press(loop: Any) -> None:
        if loop.done == 2:
            threading.Timer(0.2, os.kill, (os.getpid(), signal.SIGINT)).start()
            mesh.procs.run("import time; time.sleep(60)").get(60)

    with pytest.raises(KeyboardInterrupt):
        train(mesh, tmp_path / "one", press)
    assert len(train(mesh, tmp_path / "two", batches=3)) == 3


def test_an_interrupt_of_a_recovery_says_what_to_do(
    mesh: Mesh, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    healed = ProcMesh.heal

    def press(self: ProcMesh, **options: Any) -> Any:
        monkeypatch.undo()
        healed(self, **options)
        os.kill(os.getpid(), signal.SIGINT)

    monkeypatch.setattr(ProcMesh, "heal", press)
    with pytest.raises(KeyboardInterrupt):
        train(mesh, tmp_path, kill_once(mesh.procs, {6: 0}))
    assert f"this brings it: meshbook.restore('{tmp_path}', state)" in capsys.readouterr().out
    mesh.procs.heal()
    assert len(train(mesh, tmp_path / "two", batches=3)) == 3


def test_a_save_that_fails_is_told(mesh: Mesh, undisturbed: list[float], tmp_path: Path, capsys: Any) -> None:
    folder = tmp_path / "saves"

    def spoil(loop: Any) -> None:
        if loop.done == 5:
            folder.rename(tmp_path / "aside")
            folder.write_text("no folder")
        if loop.done == 9:
            folder.unlink()
            (tmp_path / "aside").rename(folder)

    assert train(mesh, folder, spoil) == pytest.approx(undisturbed, abs=1e-5)
    told = capsys.readouterr().out
    assert told.startswith("elastic: the save of batch 8 failed (") and told.endswith("; that of batch 4 stays\n")


def test_what_cannot_be_done_is_refused_before_the_first_batch(mesh: Mesh, tmp_path: Path) -> None:
    x = meshbook.ones(3, mesh=mesh)
    batches = [torch.ones(3)] * 4
    good = meshbook.stream(batches, mesh)

    def refuse(match: str, stream: Any = good, state: Any = None, **options: Any) -> None:
        with pytest.raises(UsageError, match=match):
            meshbook.elastic(stream, {"x": x} if state is None else state, save=tmp_path, **options)

    loader = DataLoader(TensorDataset(torch.ones(8, 3)), batch_size=2, shuffle=True)
    refuse("a stream of DataLoader cannot be set back.*StatefulDataLoader", meshbook.stream(loader, mesh))
    refuse("a stream of generator cannot be set back", meshbook.stream((each for each in batches), mesh))
    refuse("list has no state_dict and no load_state_dict: give meshbook.stream", batches)
    refuse("state names", state={})
    refuse("the stream is in it by itself", state={"stream": good})
    refuse("every=0", every=0)
    refuse("min_ranks=4: the mesh has 3 ranks", min_ranks=4)
    half = Mesh(mesh.procs.slice(gpus=slice(0, 2)))
    refuse("leave it out for slices", state={"y": meshbook.ones(2, mesh=half)}, min_ranks=1)
    assert list(tmp_path.iterdir()) == []
    assert len(list(good)) == 4


def test_a_body_outside_of_a_block_is_told_how_to_stand_in_one(mesh: Mesh, tmp_path: Path) -> None:
    with meshbook.stream([torch.ones(3)] * 4, mesh) as batches:
        loop = meshbook.elastic(batches, {"x": meshbook.ones(3, mesh=mesh)}, save=tmp_path)
        next(loop)
        with pytest.raises(UsageError, match=r"with loop\.attempt\(\):"):
            next(loop)


@pytest.mark.slow
def test_a_host_that_does_not_come_back_is_left_out(tmp_path: Path, capsys: Any) -> None:
    launcher = MovedLauncher(separate_hosts=True)
    hosts = start_hosts({"hosts": 2}, launcher)
    with hosts.spawn_procs({"gpus": 2}, name="hosts", owns_hosts=True) as procs:
        mesh = Mesh(procs)
        undisturbed = train(mesh, tmp_path / "undisturbed")
        killed = itertools.count()

        def kill(loop: Any) -> None:
            if loop.done == 6 and not next(killed):
                launcher.has_gone = True
                agent = procs._mesh.hosts[1].hello
                assert agent is not None
                os.kill(agent.pid, signal.SIGKILL)

        assert relative(train(mesh, tmp_path / "saves", kill, min_ranks=2), undisturbed) < 1e-3
        assert mesh.shape == (1, 2)
        told = capsys.readouterr().out
        assert (
            told.startswith("elastic: ranks 2,3 ended (its host is lost: ") and "goes on with hosts=1, gpus=2" in told
        )
