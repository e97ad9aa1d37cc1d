"""Batches of data go to the ranks while these work, in order, none lost, and never too many."""

from __future__ import annotations

import dataclasses
import gc
import itertools
import os
import signal
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import IPython
import numpy as np
import pytest
import torch
from patience import wait_until
from torch.distributed.tensor import Replicate, Shard
from torch.utils.data import DataLoader, TensorDataset
from tqdm import tqdm

import meshbook
from meshbook import DeviceMeshError, ProcMesh, heal_mesh
from meshbook.distributed import Mesh
from meshbook.errors import UnknownAxisError, UsageError
from meshbook.tensors.data import streams

GRACE_S = 20.0


def threads() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name == "meshbook.stream"]


def no_thread_is_left() -> bool:
    for thread in threads():
        thread.join(GRACE_S)
    return not threads()


class Pair(NamedTuple):
    x: Any
    y: Any


@dataclasses.dataclass(frozen=True)
class Sample:
    x: Any
    name: str


@pytest.mark.parametrize("prefetch", [0, 1, 3])
def test_batches_come_in_order_with_their_structure(grid: Mesh, prefetch: int) -> None:
    plain = [torch.randn(rows, 3) for rows in (4, 4, 3)]
    source = [{"x": x, "pair": Pair(x[:, 0].numpy(), [np.float32(2)]), "of": Sample(x.bool(), "n")} for x in plain]
    with meshbook.stream(source, grid, prefetch=prefetch) as batches:
        assert len(batches) == 3
        for x, batch in zip(plain, batches, strict=True):
            pair, sample = batch["pair"], batch["of"]
            assert torch.equal(batch["x"].full_tensor(), x)
            assert batch["x"].placements == (Shard(0), Replicate())
            assert isinstance(pair, Pair)
            assert pair.x.tolist() == x[:, 0].tolist()
            assert pair.y[0].item() == 2
            assert pair.y[0].placements == (Replicate(), Replicate())
            assert isinstance(sample, Sample)
            assert torch.equal(sample.x.full_tensor(), x.bool())
            assert sample.name == "n"
            assert len(threads()) <= (prefetch > 0)
    assert no_thread_is_left()


def test_a_loader_gives_what_it_gives_in_one_process(grid: Mesh) -> None:
    loader = DataLoader(TensorDataset(torch.arange(20.0).view(10, 2), torch.arange(10)), batch_size=4, shuffle=True)
    torch.manual_seed(1)
    wanted = [(x.tolist(), y.tolist()) for x, y in loader]
    torch.manual_seed(1)
    batches = meshbook.stream(loader, grid, (["dp", "tp"], ["tp"]))
    assert len(batches) == 3
    found = list(batches)
    assert [(x.tolist(), y.tolist()) for x, y in found] == wanted
    assert found[0][0].placements == (Shard(0), Shard(1))
    assert found[0][1].placements == (Replicate(), Shard(0))
    assert list(batches) == []


def test_specs_are_looked_at_before_anything_is_read(grid: Mesh) -> None:
    batch = {"x": torch.ones(4, 2), "y": torch.ones(4)}
    for spec in (["nowhere"], {"x": ["dp", "nowhere"]}):
        with pytest.raises(UnknownAxisError):
            meshbook.stream([batch], grid, spec)
    with pytest.raises(UsageError, match="not by both"):
        meshbook.stream([batch], grid, ["dp"], placements=[Shard(0), Replicate()])
    with pytest.raises(UsageError, match="cannot be read batch by batch"):
        meshbook.stream(5, grid)  # type: ignore[type-var]
    with pytest.raises(UsageError, match="prefetch=-1"):
        meshbook.stream([batch], grid, prefetch=-1)
    found = next(meshbook.stream([batch], grid, {"x": [None, "tp"]}))
    assert found["x"].placements == (Replicate(), Shard(1))
    assert found["y"].placements == (Shard(0), Replicate())
    found = next(meshbook.stream([batch], grid, placements=[Shard(-1), Shard(1)]))
    assert found["x"].placements == (Shard(1), Shard(1))
    assert found["y"].placements == (Shard(0), Replicate())
    assert next(meshbook.stream([batch], grid, []))["x"].placements == (Replicate(), Replicate())


REFUSED = {
    r"entries for 'z', and the batch has 'x'": ({"x": torch.ones(2)}, {"z": ["dp"]}),
    r"entries for 0, 1, and the batch has 0": ([torch.ones(2)], (["dp"], ["dp"])),
    r"the batch\['x'\] is one tensor, and the sharding_spec has a structure": ({"x": torch.ones(2)}, {"x": {"y": []}}),
    r"the batch\['a'\]\[1\] is a object": ({"a": [torch.ones(2), object()]}, None),
    r"no tensor in a batch of the source: 'text'": ("text", None),
    r"the batch\.x is an array of <U1": (Sample(np.array(["a"]), ""), None),
    r"masked": ({"x": np.ma.masked_equal([1, 2], 2)}, None),
    r"on a mesh already": ("mesh", None),
}


@pytest.mark.parametrize("words", REFUSED)
def test_what_cannot_be_laid_out_says_which_part(grid: Mesh, words: str) -> None:
    item, spec = REFUSED[words]
    batches = meshbook.stream([meshbook.ones(2, mesh=grid) if item == "mesh" else item], grid, spec)
    with pytest.raises(UsageError, match=words):
        next(batches)
    assert list(batches) == []


def test_arrays_of_any_kind(grid: Mesh, tmp_path: Path) -> None:
    np.save(tmp_path / "rows.npy", np.arange(12).reshape(6, 2))
    rows = np.load(tmp_path / "rows.npy", mmap_mode="r")
    big = np.arange(6.0).astype(">f8")
    arrays = [rows[:4], rows[::-1], big, np.arange(4, dtype=np.uint16), np.array(True), rows.astype(np.complex64).T]
    for array, made in zip(arrays, meshbook.stream(arrays, grid), strict=True):
        assert made.tolist() == array.tolist()
    x = torch.ones(3, 4, requires_grad=True)
    assert next(meshbook.stream([(x, x)], grid))[0].requires_grad is False


def test_tensors_of_one_batch_that_share_memory_do_not_there(grid: Mesh) -> None:
    x = torch.zeros(200, 200)
    one, other = next(meshbook.stream([(x, x)], grid, []))
    one += 1
    assert other.sum().item() == 0


def test_an_interrupt_as_the_thread_begins_ends_the_loop_and_leaves_no_thread(
    grid: Mesh, monkeypatch: pytest.MonkeyPatch
) -> None:
    class InterruptedThread(threading.Thread):
        def start(self) -> None:
            signal.raise_signal(signal.SIGINT)
            super().start()

    monkeypatch.setattr(streams, "hidden_thread", lambda run, name: InterruptedThread(target=run, name=name))
    with pytest.raises(KeyboardInterrupt), meshbook.stream([torch.zeros(4)] * 3, grid) as batches:
        next(batches)
    assert no_thread_is_left()


def test_never_more_are_ahead_and_an_interrupt_loses_none(grid: Mesh, tmp_path: Path) -> None:
    read = 0

    def endless() -> Iterator[torch.Tensor]:
        nonlocal read
        for read in itertools.count(1):
            yield torch.full((4,), float(read))

    batches = meshbook.stream(endless(), grid, prefetch=2)
    with pytest.raises(TypeError, match="does not say"):
        len(batches)
    busy = grid.procs.run(f"import os, time\nwhile not os.path.exists({str(tmp_path / 'go')!r}): time.sleep(0.01)")
    found = [next(batches), next(batches)]  # the ranks have reached neither
    timer = threading.Timer(0.5, os.kill, (os.getpid(), signal.SIGINT))
    timer.start()
    with pytest.raises(KeyboardInterrupt):
        next(batches)
    timer.join()
    assert read == 2
    (tmp_path / "go").touch()
    busy.get(GRACE_S)
    found += itertools.islice(batches, 4)
    assert [int(batch[0]) for batch in found] == [1, 2, 3, 4, 5, 6]
    assert read <= 9
    batches.close()
    assert list(batches) == []
    assert no_thread_is_left()


@pytest.mark.slow
def test_freed_batches_leave_the_ranks(grid: Mesh) -> None:
    def count() -> int:
        grid.stream.settle()
        return max(len(parts) for parts, _ in grid.stream.ask("parts").get(GRACE_S).values())

    gc.collect()
    before = count()
    batches = meshbook.stream((torch.ones(8, 8) for _ in range(100)), grid)
    most = max(count() for _ in batches)
    assert most <= before + 8
    del batches
    gc.collect()
    assert count() <= before + 1


def test_errors_of_the_source_come_in_their_turn(grid: Mesh) -> None:
    def source() -> Iterator[torch.Tensor]:
        yield torch.ones(2)
        yield torch.zeros(2)
        raise ValueError("the disk is gone")

    batches = meshbook.stream(source(), grid, prefetch=5)
    assert [next(batches).sum().item(), next(batches).sum().item()] == [2, 0]
    with pytest.raises(ValueError, match="the disk is gone") as raised:
        next(batches)
    assert "source" in [entry.name for entry in raised.traceback]
    assert list(batches) == []
    assert no_thread_is_left()


@pytest.mark.parametrize("how", ["close", "with", "collected", "one"])
def test_the_thread_and_the_source_end_with_the_stream(grid: Mesh, how: str) -> None:
    ended = threading.Event()

    def source() -> Iterator[torch.Tensor]:
        try:
            while True:
                yield torch.ones(2)
        finally:
            ended.set()

    batches = meshbook.stream(source(), grid)
    if how != "one":
        next(batches)
        assert threads()
    if how == "with":
        with batches:
            next(batches)
    elif how == "close":
        batches.close()
        batches.close()
    del batches
    gc.collect()
    assert no_thread_is_left()
    assert how == "one" or ended.wait(GRACE_S)


def test_reading_overlaps_the_work_of_the_ranks(grid: Mesh) -> None:
    """A source that waits until the ranks work on the batch before."""
    working = threading.Event()

    def source() -> Iterator[torch.Tensor]:
        yield torch.ones(2)
        assert working.wait(GRACE_S)
        yield torch.ones(2)

    batches = meshbook.stream(source(), grid)
    next(batches)
    working.set()  # with prefetch=0 nobody would wait for it now
    assert next(batches).sum().item() == 2


@pytest.mark.quick("2")
@pytest.mark.parametrize("prefetch", [0, 2])
def test_no_batch_is_lost_when_a_rank_ends(mesh2: ProcMesh, prefetch: int) -> None:
    mesh = Mesh(mesh2)
    done: list[float] = []
    failed = 0
    for batch in meshbook.stream([torch.full((4, 2), float(n)) for n in range(6)], mesh, prefetch=prefetch):
        if len(done) == 2:
            os.kill(mesh2.status()[1].pid, signal.SIGKILL)
        try:
            done.append((batch * 1).mean().item())
        except DeviceMeshError:
            failed += 1
            heal_mesh(mesh)
            done.append(batch.mean().item())
    assert done == [0, 1, 2, 3, 4, 5]
    assert failed == 1
    assert no_thread_is_left()


def test_a_stream_of_a_mesh_that_ended_says_so(mesh2: ProcMesh) -> None:
    batches = meshbook.stream((torch.ones(4) for _ in range(9)), mesh2)
    assert next(batches).sum().item() == 4
    os.kill(mesh2.status()[0].pid, signal.SIGKILL)
    wait_until(lambda: mesh2.lost, timeout_s=GRACE_S)
    given = 1
    with pytest.raises(DeviceMeshError, match="rank 0"):
        while True:
            batch = next(batches)
            given += 1
    assert given <= 4
    heal_mesh(mesh2)
    assert [each.sum().item() for each in (batch, *batches)] == [4] * (10 - given)
    late = meshbook.stream([torch.ones(4)] * 9, mesh2)
    mesh2.stop().get(GRACE_S)
    for _ in range(2):
        with pytest.raises(DeviceMeshError, match="stopped"):
            next(late)
    late.close()


@pytest.mark.slow
def test_recorded_steps_take_batches_as_arguments(grid: Mesh) -> None:
    w = meshbook.ones(2, mesh=grid).requires_grad_()
    optimizer = torch.optim.SGD([w], lr=0.1)

    @meshbook.compile
    def step(x: torch.Tensor) -> torch.Tensor:
        optimizer.zero_grad()
        loss = (x * w).sum()
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        return loss

    plain, losses = torch.ones(2), []
    source = [torch.full((3, 2), float(n)) for n in range(8)]
    for batch in meshbook.stream(source, grid):
        losses.append(step(batch).item())
    for n, found in enumerate(losses):
        assert found == pytest.approx((plain * 3 * n).sum().item())
        plain -= 0.1 * 3 * n
    assert not step.why_not

    batches = meshbook.stream(source, grid)

    @meshbook.compile
    def greedy() -> torch.Tensor:
        return next(batches) + 1

    with pytest.warns(UserWarning, match="takes a batch from a stream"):
        assert [greedy().mean().item() for _ in range(4)] == [1, 2, 3, 4]


def test_a_bar_counts_batches(grid: Mesh, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    assert not hasattr(IPython.get_ipython(), "kernel")
    monkeypatch.setitem(sys.modules, "ipykernel.zmqshell", sys)  # any module: tqdm.auto takes its name for a kernel
    for name in ("tqdm.auto", "tqdm.autonotebook"):
        monkeypatch.delitem(sys.modules, name, raising=False)
    monkeypatch.setattr(tqdm, "monitor_interval", 0)  # its thread would live as long as the process
    for _ in meshbook.stream([torch.ones(2)] * 3, grid, progress=True):
        pass
    assert "3/3" in capsys.readouterr().err


class Counting:
    """A source that can be set back."""

    def __init__(self, count: int) -> None:
        self.count, self.at = count, 0

    def __iter__(self) -> Iterator[torch.Tensor]:
        while self.at < self.count:
            self.at += 1
            yield torch.full((4,), float(self.at))

    def state_dict(self) -> dict[str, int]:
        return vars(self)  # which goes on changing

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.at = state["at"]


@pytest.mark.parametrize("prefetch", [0, 3])
@pytest.mark.parametrize("kind", ["list", "stateful"])
def test_a_stream_goes_back_to_a_position(
    grid: Mesh, kind: str, prefetch: int, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tqdm, "monitor_interval", 0)
    source = Counting(6) if kind == "stateful" else [torch.full((4,), float(at)) for at in range(1, 7)]
    with meshbook.stream(source, grid, prefetch=prefetch, progress=True) as batches:  # type: ignore[type-var]
        start = batches.state_dict()
        assert [int(batch[0]) for batch in itertools.islice(batches, 3)] == [1, 2, 3]
        position = batches.state_dict()
        assert int(next(batches)[0]) == 4
        batches.load_state_dict(position)
        assert [int(batch[0]) for batch in batches] == [4, 5, 6]
        assert "6/6" in capsys.readouterr().err or kind == "stateful"
        batches.load_state_dict(start)
        assert [int(batch[0]) for batch in batches] == [1, 2, 3, 4, 5, 6]
    assert no_thread_is_left()


@pytest.mark.filterwarnings("ignore:'set_vital' is deprecated")
def test_a_loader_of_torchdata_goes_back_to_a_position(grid: Mesh) -> None:
    loaders = pytest.importorskip("torchdata.stateful_dataloader")
    torch.manual_seed(4)
    loader = loaders.StatefulDataLoader(TensorDataset(torch.arange(24.0)), batch_size=4, shuffle=True)
    with meshbook.stream(loader, grid) as batches:
        first = [batch.tolist() for (batch,) in itertools.islice(batches, 2)]
        position = batches.state_dict()
        rest = [batch.tolist() for (batch,) in batches]
        batches.load_state_dict(position)
        assert [batch.tolist() for (batch,) in batches] == rest
    assert sorted(itertools.chain(*first, *rest)) == torch.arange(24.0).tolist()


def test_a_stream_that_cannot_go_back_says_why(grid: Mesh) -> None:
    with meshbook.stream(DataLoader(TensorDataset(torch.ones(8, 2))), grid) as batches:
        with pytest.raises(UsageError, match=r"DataLoader cannot be set back.*StatefulDataLoader"):
            batches.state_dict()
        with pytest.raises(UsageError, match="cannot be set back"):
            batches.load_state_dict({"batches": 1, "source": None})
