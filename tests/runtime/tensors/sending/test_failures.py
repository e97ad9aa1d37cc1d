"""An operation that fails on a rank costs what depends on it, and nothing that is issued behind it."""

from __future__ import annotations

import contextlib
import os
import random
import re
import signal
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from patience import wait_until

import meshbook
from benchmarks.tensor_program_lines import run_line, write_program
from meshbook import DeviceMeshError, ProcMesh, this_host
from meshbook.distributed import Mesh, TensorError, TensorLost, inspect, remote
from meshbook.tensors.ranks import known_meshes

OUT_OF_RANGE = r"aten\.embedding.*test_failures.py, line \d+\) failed: IndexError"


@pytest.fixture
def grid(square: ProcMesh) -> Iterator[Mesh]:
    yield Mesh(square)


def assert_out_of_range(*tensors: torch.Tensor) -> None:
    for each in tensors:
        with pytest.raises(TensorError, match=OUT_OF_RANGE):
            each.sum().item()


def embed(mesh: Mesh, *indices: int, table: torch.Tensor | None = None) -> torch.Tensor:
    """Rows of a table of four; indices are cut over the ranks along dp, so only some have one that is out of range."""
    table = meshbook.ones(4, 3, mesh=mesh) if table is None else table
    return torch.nn.functional.embedding(meshbook.distribute(torch.tensor(indices), mesh, ["dp"]), table)


@pytest.mark.some("spec1")
@pytest.mark.slow
@pytest.mark.parametrize("spec", [["dp"], ["tp"], [("dp", "tp")], [None, "tp"], [None]])
def test_rows_that_a_table_does_not_have_are_refused_however_it_is_cut(grid: Mesh, spec: list[str | None]) -> None:
    table = meshbook.ones(4, 4, mesh=grid, sharding_spec=spec)
    for _ in range(4):  # from the third time on it is done in another way
        assert embed(grid, 0, 3, table=table).sum().item() == 8.0
        for indices in ((0, 4), (-1, 0)):
            with pytest.raises(TensorError, match="index out of range"):
                embed(grid, *indices, table=table).sum().item()


@pytest.mark.some("spec1")
@pytest.mark.slow
@pytest.mark.parametrize("spec", [["dp"], [("dp", "tp")], [None]])
def test_classes_that_one_hot_does_not_have_are_refused_however_they_are_cut(
    grid: Mesh, spec: list[str | None]
) -> None:
    def classes(*indices: int, count: int = 4) -> torch.Tensor:
        return torch.nn.functional.one_hot(meshbook.distribute(torch.tensor(indices), grid, spec), count)

    wanted = torch.nn.functional.one_hot(torch.tensor([3, 0, 1]), 4)
    for _ in range(3):  # from the third time on other operations are done in another way
        assert torch.equal(classes(3, 0, 1).full_tensor(), wanted)
        assert torch.equal(classes(3, 0, 1, count=-1).full_tensor(), wanted)
        for indices, why in (((0, 1, 4), "smaller than num_classes"), ((-1, 0, 1), "non-negative")):
            with pytest.raises(TensorError, match=rf"one_hot.*test_failures.py, line \d+\) failed.*{why}"):
                classes(*indices).sum().item()
    with torch.inference_mode(), pytest.raises(TensorError, match="non-negative"):
        classes(0, 1, -1, count=-1).sum().item()
    assert torch.equal(torch.nn.functional.one_hot(torch.tensor([3, 0, 1])), wanted)  # of plain tensors


@pytest.mark.some("indices2")
@pytest.mark.slow
@pytest.mark.parametrize("indices", [(0, 1, 2, 9), (9, 0, 1, 2), (9, 0, 0, 9)])
def test_what_is_issued_behind_is_done_and_what_depends_is_not(grid: Mesh, indices: tuple[int, ...]) -> None:
    x = meshbook.distribute(torch.arange(16.0).view(4, 4), grid, ["dp", "tp"])
    counted = meshbook.zeros(4, mesh=grid, sharding_spec=["dp"])
    bad = embed(grid, *indices)
    worse = bad @ bad.T + 1
    products = [x @ x.T for _ in range(3)]  # collectives, for which ranks wait that have not failed
    for _ in range(5):
        counted.add_(x.sum(1))
    total = counted.sum() + products[0].sum()
    plain = torch.arange(16.0).view(4, 4)
    assert total.item() == 5 * plain.sum() + (plain @ plain.T).sum()
    assert torch.equal(products[2].full_tensor(), plain @ plain.T)
    assert_out_of_range(bad, worse)


@pytest.mark.slow
def test_batches_behind_are_done_as_well(grid: Mesh) -> None:
    x = meshbook.ones(6, mesh=grid, sharding_spec=["dp"])
    bad = embed(grid, 9, 1)
    for _ in range(700):  # three batches
        x.add_(1)
    more = bad + 1
    for _ in range(700):
        x.add_(1)
    assert x.tolist() == [1401.0] * 6
    assert_out_of_range(more)


@pytest.mark.slow
def test_a_write_of_what_failed_is_told_once_and_not_done(grid: Mesh) -> None:
    x = meshbook.ones(2, 3, mesh=grid)
    row, apart = x[0], meshbook.ones(3, mesh=grid)
    x.add_(embed(grid, 0, 9))
    y = x * 2
    assert_out_of_range(row, y)
    assert x.tolist() == [[1.0] * 3] * 2 and row.tolist() == [1.0] * 3 and apart.tolist() == [1.0] * 3
    x.add_(1)
    assert row.tolist() == [2.0] * 3


@pytest.mark.slow
def test_what_some_ranks_have_written_is_refused_until_it_is_overwritten(grid: Mesh) -> None:
    x = meshbook.ones(4, mesh=grid, sharding_spec=["dp"])
    bad = embed(grid, 0, 9).sum(1)  # the first ranks have it
    x.narrow(0, 0, 4).add_(bad.redistribute(["dp"]).sum())
    assert_out_of_range(x)
    x.copy_(torch.zeros(4))
    assert x.sum().item() == 0.0


@pytest.mark.nightly
def test_ranks_remember_of_what_they_left_out_only_what_may_matter(grid: Mesh) -> None:
    x = meshbook.ones(4, mesh=grid, sharding_spec=["dp"])
    for _ in range(20):
        bad = embed(grid, 0, 9)
        x.narrow(0, 0, 4).add_(bad.redistribute(["dp"]).sum())
        assert_out_of_range(x)
        x.fill_(1.0)
    remembered = grid.procs.execute(lambda name: len(known_meshes.meshes[name].undone()), grid.stream.name).get()
    assert max(remembered.values()) <= 2


@pytest.mark.slow
def test_values_of_the_ranks_are_asked_for_again(grid: Mesh) -> None:
    x = meshbook.distribute(torch.arange(8.0), grid, ["dp"])
    bad = embed(grid, 0, 9)
    assert (x * 2).tolist() == (torch.arange(8.0) * 2).tolist()
    with pytest.raises(DeviceMeshError, match="out of range"):
        grid.execute(lambda tensor: tensor.sum(), bad)
    assert "mean" in repr(meshbook.ones(2000, mesh=grid) + x.sum())


@pytest.mark.slow
def test_an_optimizer_does_not_step_with_what_failed(grid: Mesh) -> None:
    torch.manual_seed(0)
    layer = torch.nn.Embedding(4, 3)
    plain = layer.weight.detach().clone()
    model = meshbook.module_to_mesh(layer, grid)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    for indices in ((0, 9), (0, 1)):
        optimizer.zero_grad()
        loss = model(meshbook.distribute(torch.tensor(indices), grid, ["dp"])).sum()
        loss.backward()
        if 9 in indices:
            with pytest.raises(TensorError, match=OUT_OF_RANGE):
                optimizer.step()
            assert torch.equal(model.weight.full_tensor(), plain)
        else:
            optimizer.step()
            assert loss.item() == pytest.approx(float(plain[:2].sum()), abs=1e-5)
    step = next(iter(optimizer.state.values()))["step"]
    assert float(step) == 1.0


def _has_elements(seed: int) -> bool:
    """Nobody waits in a collective of no bytes, so a rank may get past one where the others cannot follow."""
    return all(leaf.make().numel() for leaf in write_program(seed, 2).leaves)


@pytest.mark.nightly
@pytest.mark.parametrize("seed", list(filter(_has_elements, range(40_000, 40_020)))[:8])
def test_programs_are_done_around_what_fails(grid: Mesh, seed: int) -> None:
    program, chance = write_program(seed, 2), random.Random(seed)
    wanted = program.run([leaf.make() for leaf in program.leaves])
    names = {f"t{at}": leaf.place(grid) for at, leaf in enumerate(program.leaves)}
    failed = []
    for line in program.lines:
        if chance.random() < 0.3:
            failed.append(embed(grid, *chance.choice([(0, 9), (9, 0), (9, 9)])) * 2)
        run_line(line, names)
    for name, tensor in names.items():
        if isinstance(tensor, torch.Tensor):
            whole = tensor.full_tensor() if isinstance(tensor, meshbook.MeshTensor) else tensor
            torch.testing.assert_close(whole.detach(), wanted[name], equal_nan=True)
    assert_out_of_range(*failed)


@pytest.mark.some("0.003")
@pytest.mark.slow
@pytest.mark.parametrize("delay_s", [0.0, 0.003, 0.01, 0.03, 0.1])
def test_an_interrupt_behind_a_failure_leaves_the_mesh_usable(grid: Mesh, delay_s: float) -> None:
    x, kept = meshbook.ones(4, mesh=grid, sharding_spec=["dp"]), meshbook.ones(4, mesh=grid)
    kept.sum().item()
    bad = embed(grid, 0, 9)
    for _ in range(1000):
        x.add_(1)
    pressed = threading.Timer(delay_s, os.kill, (os.getpid(), signal.SIGINT))
    with contextlib.suppress(KeyboardInterrupt, DeviceMeshError):
        pressed.start()
        assert x.sum().item() == 4004
        pressed.join()
    with pytest.raises(DeviceMeshError):
        bad.tolist()
    with contextlib.suppress(DeviceMeshError):  # whether it was done depends on when
        assert x.sum().item() == 4004
    assert kept.sum().item() == meshbook.ones(4, mesh=grid).sum().item() == 4.0


def hold_on(begun: str, until: str) -> None:
    """Be busy until there is a file, though somebody interrupts."""
    Path(begun, str(os.getpid())).touch()
    while True:
        with contextlib.suppress(KeyboardInterrupt):
            while not os.path.exists(until):
                time.sleep(0.01)
            return


@contextlib.contextmanager
def dropped_by_an_interrupt(busy: ProcMesh, path: Path) -> Iterator[None]:
    """These ranks begin with nothing of what is issued here."""
    (begun := path / "begun").mkdir()
    holding = busy.execute(hold_on, str(begun), str(path / "go"))
    wait_until(lambda: len(list(begun.iterdir())) == len(busy))
    yield
    busy.interrupt()
    (path / "go").touch()
    with contextlib.suppress(DeviceMeshError):
        holding.get(60)


@pytest.mark.slow
def test_what_an_interrupt_drops_on_busy_ranks_behind_a_failure_is_told(grid: Mesh, tmp_path: Path) -> None:
    x, kept = meshbook.zeros(4, mesh=grid, sharding_spec=["dp"]), meshbook.ones(4, mesh=grid)
    view = x.view(4)
    assert view.sum().item() + kept.sum().item() == 4.0
    with dropped_by_an_interrupt(grid.procs.slice(dp=1), tmp_path):
        bad = embed(grid, 9, 0).sum()  # fails on ranks that are not busy
        for _ in range(700):
            x.add_(1)
        calls = [each.future.call for each in grid.stream._underway]  # type: ignore[attr-defined]
        wait_until(lambda: any(call.failures for call in calls))
    for use in (x.sum, view.sum, lambda: x.copy_(bad), x.sum):  # the copy, which is not done, does not make it whole
        with pytest.raises(DeviceMeshError):
            use().item()
    with pytest.raises(DeviceMeshError):
        bad.tolist()
    x.zero_()
    for _ in range(300):
        x.add_(kept[0])
    assert x.tolist() == view.tolist() == [300.0] * 4


@pytest.mark.slow
def test_a_write_of_a_tensor_that_some_ranks_have_not_got_is_told(grid: Mesh, tmp_path: Path) -> None:
    x = meshbook.ones(2, mesh=grid)
    assert x.sum().item() == 2.0
    with dropped_by_an_interrupt(grid.procs.slice(dp=1), tmp_path):
        y = meshbook.distribute(torch.ones(2), grid)
    x.add_(y)
    for lost in (x, y):
        with pytest.raises(DeviceMeshError, match="distribute"):
            lost.sum().item()
    x.copy_(torch.zeros(2))
    assert x.add_(1).tolist() == [1.0, 1.0]


def test_nothing_is_sent_to_ranks_that_are_being_given_their_tensors(grid: Mesh) -> None:
    x, stream = meshbook.ones(4, mesh=grid, sharding_spec=["dp"]), grid.stream
    assert x.sum().item() == 4.0

    def sent() -> set[int]:
        return set(
            grid.procs.execute(lambda name: known_meshes.meshes[name].progress([]).number, stream.name).get().values()
        )

    before = sent()
    stream.begin_repair()
    x.add_(1)
    assert sent() == before  # though this call is one that sends what was issued
    stream.end_repair()
    assert sent() == {before.pop() + 1}
    assert x.sum().item() == 8.0


@pytest.mark.slow
def test_a_recorded_step_behind_a_failure_is_done(grid: Mesh) -> None:
    w = meshbook.zeros(4, 4, mesh=grid, sharding_spec=["dp", "tp"])

    @meshbook.compile
    def step(x: torch.Tensor) -> torch.Tensor:
        w.add_(x @ x.T)
        return w.sum()

    x = meshbook.ones(4, 2, mesh=grid, sharding_spec=["dp"])
    for _ in range(4):
        step(x)
    assert step.why_not == ""
    assert w.full_tensor()[0, 0] == 8.0
    row = w[0]
    for indices in ((0, 9), (9, 0)):
        failed = embed(grid, *indices)
        totals = [step(x), step(x)]
        dependent = step(x + failed.sum())  # which costs this step alone, and what it was to write
        assert totals[1].item() == 16 * 12.0
        with pytest.raises(DeviceMeshError, match="out of range"):
            dependent.item()
        for written in (w, row):
            with pytest.raises(DeviceMeshError, match="out of range"):
                written.sum().item()
        w.fill_(8.0)
        assert w.sum().item() == 16 * 8.0 and row.sum().item() == 4 * 8.0


@pytest.mark.slow
def test_a_hunt_finds_what_is_behind_a_failure(grid: Mesh) -> None:
    x = meshbook.distribute(torch.tensor([1.0, -1.0, 2.0, 3.0]), grid, ["dp"])
    with pytest.raises(TensorError, match=r"aten\.log\.default .* a NaN is on ranks 0,1"), meshbook.detect_anomaly():
        failed = embed(grid, 0, 9)
        logarithms = x.log()
        (x @ x).item()
    assert_out_of_range(failed)
    assert logarithms.isnan().tolist() == [False, True, False, False]


def test_a_hunt_that_an_error_ends_tells_nothing_later(grid: Mesh) -> None:
    x = meshbook.ones(4, mesh=grid, sharding_spec=["dp"])
    with pytest.raises(ZeroDivisionError), meshbook.detect_anomaly():
        for _ in range(300):
            lost = (-x).log()
        1 / 0  # noqa: B018
    assert x.sum().item() == 4.0
    assert lost.isnan().all().item()


def end_rank(mesh: Mesh, rank: int) -> None:
    pid = mesh.procs.status()[rank].pid
    os.kill(pid, signal.SIGKILL)
    wait_until(lambda: not Path(f"/proc/{pid}").exists())


@meshbook.compile
def root_step(x: torch.Tensor) -> torch.Tensor:
    return (x * 2).sqrt().sum()


@pytest.mark.quick("0")
@pytest.mark.parametrize("rank", [0, 1])
def test_a_hunt_goes_on_behind_a_repair(mesh2: ProcMesh, rank: int) -> None:
    mesh = Mesh(mesh2)
    x = meshbook.ones(4, mesh=mesh)
    for _ in range(5):
        assert root_step(x).item() == pytest.approx(4 * 2**0.5)
    with pytest.raises(TensorError, match=r"aten\.sqrt.*test_failures.py, line"), meshbook.detect_anomaly():
        root_step(x)
        end_rank(mesh, rank)
        with pytest.raises(DeviceMeshError):
            root_step(x).item()
        assert re.search(r"\n  mesh tensors: \d+ whole again", str(mesh.heal()))
        for _ in range(5):
            assert root_step(x).item() == pytest.approx(4 * 2**0.5)
        root_step(-x)
    assert root_step(-x).isnan().item()  # nobody looks now
    assert x.tolist() == [1.0] * 4


def test_a_repair_names_the_variables_whose_tensors_are_lost(hurt: Mesh, monkeypatch: pytest.MonkeyPatch) -> None:
    kept, cut = meshbook.ones(4, mesh=hurt), meshbook.ones(4, 3, mesh=hurt, sharding_spec=[("dp", "tp"), None])
    for name, value in {"kept": kept, "cut": cut, "_hidden": cut}.items():
        monkeypatch.setattr(sys.modules["__main__"], name, value, raising=False)
    assert cut.sum().item() == 12.0
    end_rank(hurt, 3)
    assert re.search(r"\n  mesh tensors: 1 whole again, \d lost \(cut\)", str(hurt.heal()))  # a sum may be left, too


@pytest.mark.slow
def test_a_hunt_says_that_a_rank_which_ended_kept_it_from_looking(mesh2: ProcMesh) -> None:
    mesh = Mesh(mesh2)
    x = meshbook.ones(4, mesh=mesh)
    pid = mesh.procs.status()[1].pid
    with pytest.warns(UserWarning, match="do that again within it"), meshbook.detect_anomaly():
        os.kill(pid, signal.SIGSTOP)
        logarithms = (-x).log()
        mesh.stream.flush()
        end_rank(mesh, 1)
        with pytest.raises(DeviceMeshError):
            x.sum().item()
        mesh.heal()
    assert logarithms.isnan().all().item()  # the other rank has it, and could not say so
    with meshbook.detect_anomaly():
        assert x.sum().item() == 4.0


@pytest.mark.slow
def test_a_hunt_that_the_end_of_a_rank_ends_leaves_nothing_behind(mesh2: ProcMesh) -> None:
    mesh = Mesh(mesh2)
    x = meshbook.ones(4, mesh=mesh)
    for _ in range(5):
        root_step(x)
    with pytest.raises(DeviceMeshError), meshbook.detect_anomaly():
        root_step(x)
        logarithms = (-x).log()
        end_rank(mesh, 1)
        root_step(x).item()
    mesh.heal()
    assert root_step(x).item() == pytest.approx(4 * 2**0.5)
    assert root_step(-x).isnan().item()
    with contextlib.suppress(DeviceMeshError):  # whether it was done depends on when
        assert logarithms.isnan().all().item()
    with meshbook.detect_anomaly():
        assert root_step(x).item() == pytest.approx(4 * 2**0.5)


@pytest.mark.slow
@pytest.mark.parametrize("indices", [(0, 9), (9, 0)])
def test_tensors_go_to_other_meshes_behind_a_failure_that_nobody_knew_of(grid: Mesh, indices: tuple[int, ...]) -> None:
    x, part = meshbook.distribute(torch.arange(8.0), grid, ["dp"]), grid.slice(dp=0)
    for _ in range(3):
        bad = embed(grid, *indices)
        x.add_(1)  # on a rank that has halted it is laid aside
        moved, back = x.to_mesh(part), x.to_mesh(part).to_mesh(grid, ["dp"])
        with pytest.raises(TensorError, match=OUT_OF_RANGE):
            bad.to_mesh(part).sum().item()
        assert moved.tolist() == back.tolist() == x.tolist()


@pytest.mark.slow
def test_functions_on_the_ranks_see_what_was_issued_behind_a_failure(grid: Mesh) -> None:
    x = meshbook.distribute(torch.arange(8.0), grid, ["dp"])
    wrong = [embed(grid, 9, 0), embed(grid, 0, 9)]
    x.add_(1)
    doubled = grid.execute(lambda tensor: tensor * 2, x)
    assert doubled.tolist() == [2.0 * number for number in range(1, 9)]
    wrong.append(embed(grid, 9, 0))
    x.add_(1)
    sums = grid.procs.execute(lambda tensor: tensor.full_tensor().sum().item(), x).get(60)
    assert set(sums.values()) == {44.0}
    assert_out_of_range(*wrong)


def written_so_far() -> list[float]:
    import __main__

    return list(__main__.written.to_local().tolist())


@pytest.mark.some("indices1")
@pytest.mark.slow
@pytest.mark.parametrize("indices", [(0, 9), (9, 0)])
def test_cells_see_what_was_issued_behind_a_failure_once_a_value_was_read(
    mesh2: ProcMesh, indices: tuple[int, int]
) -> None:
    mesh = Mesh(mesh2)
    x = meshbook.zeros(4, mesh=mesh)
    mesh2.push({"written": x})
    at, table = meshbook.distribute(torch.tensor(indices), mesh, ["gpus"]), meshbook.ones(4, 3, mesh=mesh)
    for times in (1, 3):
        bad = torch.nn.functional.embedding(at, table)
        x.add_(1)
        assert set(map(tuple, mesh.execute(written_so_far).values())) == {(float(times),) * 4}
        bad = torch.nn.functional.embedding(at, table)
        x.add_(1)
        assert x.sum().item() == 4.0 * (times + 1)
        assert set(map(tuple, mesh2.execute(written_so_far).get(60).values())) == {(times + 1.0,) * 4}
        mesh2.run(f"assert written.to_local().tolist() == [{times + 1.0}] * 4").get(60)
        assert_out_of_range(bad)


@pytest.mark.quick("0")
@pytest.mark.parametrize("bad_rank", [0, 3])
def test_the_local_view_goes_on_behind_a_failure_that_nobody_knew_of(square: ProcMesh, bad_rank: int) -> None:
    with square.activate():
        table, x = torch.ones(4, 3), torch.zeros(4)
        at = (square.rank_tensor(["dp", "tp"]) == bad_rank) * 9  # out of range on one rank
    wrong = torch.nn.functional.embedding(at.long(), table)
    x.add_(1)
    assert inspect(x.reduce(["dp", "tp"])).tolist() == [4.0] * 4
    wrong = torch.nn.functional.embedding(at.long(), table)
    x.add_(1)
    assert inspect(x.slice_mesh(dp=0, tp=0).to_mesh(square), dp=1, tp=1).tolist() == [2.0] * 4
    wrong = torch.nn.functional.embedding(at.long(), table)
    x.add_(1)
    assert inspect(remote(lambda tensor: tensor * 2, propagate=lambda tensor: tensor)(x), dp=1).tolist() == [6.0] * 4
    with pytest.raises(TensorError, match=OUT_OF_RANGE):
        inspect(wrong)


def test_tensors_whose_ranks_have_all_ended_are_lost_and_say_so() -> None:
    with this_host().spawn_procs({"gpus": 2}, device="cpu", name="replaced") as procs:
        x = meshbook.ones(4, mesh=Mesh(procs))
        assert x.sum().item() == 4.0
        assert str(procs.respawn([0, 1])).endswith("\n  mesh tensors: 1 lost")
        with pytest.raises(TensorLost, match="was on ranks 0,1 alone, and ended with them"):
            x.sum().item()
        assert (meshbook.ones(4, mesh=Mesh(procs)) + 1).sum().item() == 8.0
