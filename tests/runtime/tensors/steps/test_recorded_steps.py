"""Steps that ranks repeat by themselves: equal to those that are not, bit for bit, or not repeated and said why."""

from __future__ import annotations

import contextlib
import copy
import os
import signal
import threading
from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

import meshbook
from meshbook import DeviceMeshError, ProcMesh, heal_mesh, this_host
from meshbook.distributed import Mesh
from meshbook.tensors.sending.op_stream import BATCHES_AHEAD, OpStream
from meshbook.tensors.steps.recorded_steps import CompiledStep, Unrepeatable

Step = Callable[..., Any]


@pytest.fixture(scope="module")
def mesh(square: ProcMesh) -> Mesh:
    return Mesh(square)


@pytest.fixture
def replays(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Grows by one for each step that is one message."""
    seen: list[int] = []
    replay = OpStream.replay

    def count(self: OpStream, step: Any, *args: Any) -> Any:
        seen.append(len(step.issued))
        return replay(self, step, *args)

    monkeypatch.setattr(OpStream, "replay", count)
    return seen


def as_it_is(step: Step) -> Step:
    return step


def linear(mesh: Mesh) -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(4)
    model = meshbook.module_to_mesh(nn.Sequential(nn.Linear(4, 4), nn.Dropout(0.5)), mesh)
    return model, torch.optim.AdamW(model.parameters(), lr=0.1)


def stepping(model: nn.Module, optimizer: torch.optim.Optimizer) -> Step:
    def step(x: torch.Tensor) -> torch.Tensor:
        optimizer.zero_grad()
        loss = (model(x) ** 2).sum()
        loss.backward()
        optimizer.step()
        return loss

    return step


def count_anew(_: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    for at, state in enumerate(optimizer.state.values()):
        state["step"].fill_(at)


def replace_a_counter(_: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    state = next(iter(optimizer.state.values()))
    optimizer.kept = state["step"]  # type: ignore[attr-defined]
    state["step"] = torch.tensor(40.0)


CHANGES: dict[str, Callable[[Any, torch.optim.Optimizer], object]] = {
    "evaluate": lambda model, _: model.eval(),
    "learn_slower": lambda _, optimizer: optimizer.param_groups[0].update(lr=0.001),
    "load": lambda _, optimizer: optimizer.load_state_dict(optimizer.state_dict()),
    "freeze": lambda model, _: model[0].bias.requires_grad_(False),
    "exchange": lambda model, _: setattr(model[0].weight, "data", model[0].weight.data * 2),
    "write": torch.no_grad()(lambda model, _: model[0].weight.mul_(3)),
    "forget_gradients": lambda _, optimizer: optimizer.zero_grad(),
    "count_anew": count_anew,
    "move_a_counter": lambda _, optimizer: setattr([*optimizer.state.values()][-1]["step"], "data", torch.tensor(1.0)),
    "replace_a_counter": replace_a_counter,
    "add_a_layer": lambda model, _: model.append(nn.Tanh()),
}


@pytest.mark.some("count_anew", "move_a_counter")
@pytest.mark.slow
@pytest.mark.parametrize("change", CHANGES)
def test_what_changes_between_steps_counts(mesh: Mesh, replays: list[int], change: str) -> None:
    found: list[list[Any]] = []
    for compile in (as_it_is, meshbook.compile):
        model, optimizer = linear(mesh)
        batches = [meshbook.randn(rows, 4, mesh=mesh, sharding_spec=["dp"]) for rows in [6] * 6 + [8] * 6]
        step = compile(stepping(model, optimizer))
        losses = [step(batch).item() for batch in batches[:5]]
        CHANGES[change](model, optimizer)
        losses += [step(batch).item() for batch in (*batches, *batches)]
        values = [tensor for p in model.parameters() for tensor in (p, p.grad) if tensor is not None]
        values += [state["step"] for state in copy.deepcopy(optimizer).state.values()]
        found.append([*losses, *[tensor.tolist() for tensor in values]])
    assert found[0] == found[1]
    assert len(replays) >= 8


def test_numbers_that_change_are_given_as_tensors(mesh: Mesh, replays: list[int]) -> None:
    weight = meshbook.ones(4, mesh=mesh)
    step = meshbook.compile(lambda factor: weight.mul_(factor) + factor)
    sums = [step(torch.tensor(float(factor))).sum().item() for factor in (1, 2, 3, 4, 5)]
    assert sums == [4 * (product + factor) for product, factor in ((1, 1), (2, 2), (6, 3), (24, 4), (120, 5))]
    assert len(replays) == 3


def refused(step: Step, reason: str, *args: Any, calls: int = 8) -> CompiledStep[..., Any]:
    compiled = meshbook.compile(step)
    with pytest.warns(Unrepeatable, match=reason) as warned:
        for _ in range(calls):
            compiled(*args)
    assert len(warned) == 1
    assert compiled.why_not
    return compiled


@pytest.mark.nightly
def test_what_cannot_be_repeated_is_run_as_it_is_and_says_why(mesh: Mesh, replays: list[int]) -> None:
    x = meshbook.ones(4, mesh=mesh)
    seen: list[float] = []
    refused(lambda: seen.append(x.sum().item()), r"asks the ranks for a value.*test_recorded_steps.py, line \d+")
    assert seen == [4.0] * 8

    def count() -> torch.Tensor:
        seen.append(1)
        return x * float(len(seen))

    refused(count, r"aten.mul.Tensor .*line \d+.* is another operation each time; .*torch.tensor\(number\)")
    refused(lambda: x * torch.rand(4), "draws numbers in this process")
    outside = torch.ones(4)
    refused(lambda: x * outside, "a tensor of this process takes part in aten.mul.Tensor")
    refused(lambda: meshbook.distribute(outside, mesh) + x, "sends a tensor of this process")
    refused(lambda y: x * y, "a tensor of this process is an argument", outside)
    refused(lambda: outside.add_(x.numel()), "writes to a tensor of this process")
    numbers = iter(range(20))
    scaled = meshbook.compile(lambda y: x * y)
    with pytest.warns(Unrepeatable, match="16 calls of it were given other arguments"):
        assert [scaled(float(number)).tolist()[0] for number in numbers] == [float(number) for number in range(20)]
    state = [x]

    def carry() -> None:
        state[0] = state[0] + 1

    refused(carry, "reads a tensor that is not there any more after it")
    assert state[0].tolist() == [9.0] * 4
    model, optimizer = linear(mesh)
    compiled = meshbook.compile(stepping(model, optimizer))
    with pytest.warns(Unrepeatable, match="is zero_grad\\(\\) within the step"):
        for _ in range(14):
            compiled(x.view(1, 4))
            optimizer.zero_grad()
    plain = torch.optim.AdamW(model.parameters(), foreach=False)
    refused(stepping(model, plain), "optimizers do so to count steps, but for .* as torch makes them", x.view(1, 4))
    assert not replays


def test_ranks_keep_nothing_of_a_repeated_step(mesh: Mesh, replays: list[int]) -> None:
    step = meshbook.compile(stepping(*linear(mesh)))
    x = meshbook.randn(6, 4, mesh=mesh)
    counts = []
    for _ in range(9):
        step(x)
        mesh.stream.settle()
        counts.append(next(iter(mesh.stream.ask("parts").get().values())))
    assert len(replays) >= 5
    assert len({len(held) + len(given_up) for held, given_up in counts[-4:]}) == 1


class Looking(nn.Module):
    """Fails in its forward where a row is out of range."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.layer = nn.Embedding(5, 3), nn.Linear(3, 3)

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        return self.layer(self.table(rows))


def looking(mesh: Mesh) -> tuple[Step, Callable[[], dict[str, torch.Tensor]]]:
    """A step that trains, and what it has trained: how often, and to which values."""
    torch.manual_seed(5)
    model = meshbook.module_to_mesh(Looking(), mesh)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1, fused=True)

    def trained() -> dict[str, torch.Tensor]:
        counts = {f"steps {at}": each["step"].clone() for at, each in enumerate(optimizer.state.values())}
        return {name: each.full_tensor() for name, each in model.state_dict().items()} | counts

    return meshbook.compile(stepping(model, optimizer)), trained


def assert_trained(trained: dict[str, torch.Tensor], mesh: Mesh, batches: Sequence[torch.Tensor]) -> None:
    """As by steps that are waited for one by one."""
    step, expected = looking(mesh)
    for batch in batches:
        step(batch).item()
    for name, value in expected().items():
        assert torch.equal(trained[name], value), name


@pytest.mark.slow
def test_of_several_steps_under_way_those_behind_one_that_fails_are_not_done(mesh: Mesh, replays: list[int]) -> None:
    step, trained = looking(mesh)
    good, bad = (meshbook.distribute(torch.tensor(rows), mesh) for rows in ([1, 2], [1, 7]))
    for _ in range(4):
        step(good).item()
    losses = [step(batch) for batch in (good, bad, good, good)]
    losses[0].item()
    for loss in losses[1:]:
        with pytest.raises(DeviceMeshError, match=r"embedding.default .*out of range"):
            loss.item()
    assert len(replays) >= 5
    assert_trained(trained(), mesh, [good] * 5)
    losses = [step(good) for _ in range(3)]
    assert_trained(trained(), mesh, [good] * 8)


@pytest.mark.slow
def test_who_looks_at_no_loss_is_told_of_a_failed_step_by_a_later_one(mesh: Mesh, replays: list[int]) -> None:
    step, trained = looking(mesh)
    good, bad = (meshbook.distribute(torch.tensor(rows), mesh) for rows in ([1, 2], [1, 7]))
    for _ in range(4):
        step(good)
    step(bad)
    with pytest.raises(DeviceMeshError, match=r"embedding.default .*out of range"):
        for _ in range(3 * BATCHES_AHEAD):
            step(good)
    assert_trained(trained(), mesh, [good] * 4)
    step(good)
    assert_trained(trained(), mesh, [good] * 5)


@pytest.mark.some("0.02")
@pytest.mark.slow
@pytest.mark.parametrize("delay_s", [0.02, 0.05, 0.1])
def test_steps_that_an_interrupt_cuts_off_are_done_or_not_and_counted_so(
    mesh: Mesh, replays: list[int], delay_s: float
) -> None:
    step, trained = looking(mesh)
    rows = meshbook.distribute(torch.tensor([1, 2]), mesh)
    for _ in range(4):
        step(rows).item()
    pressed = threading.Timer(delay_s, os.kill, (os.getpid(), signal.SIGINT))
    with pytest.raises(KeyboardInterrupt):
        pressed.start()
        while True:
            step(rows)
    pressed.join()
    with contextlib.suppress(DeviceMeshError):  # of the steps that were cut off
        step(rows).item()
    try:
        found = trained()
    except DeviceMeshError:  # some ranks had begun to step
        heal_mesh(mesh)
        found = trained()
    assert int(found["steps 0"]) >= 4
    assert_trained(found, mesh, [rows] * int(found["steps 0"]))


@pytest.mark.slow
def test_a_rank_that_dies_under_several_steps_costs_those_that_were_not_done(replays: list[int]) -> None:
    with this_host().spawn_procs({"dp": 2}, name="hurt") as procs:
        mesh = Mesh(procs)
        step, trained = looking(mesh)
        rows = meshbook.distribute(torch.tensor([1, 2]), mesh)
        for _ in range(4):
            step(rows).item()
        pid = procs.status()[1].pid
        with pytest.raises(DeviceMeshError):
            for at in range(4 * BATCHES_AHEAD):
                step(rows)
                if at == BATCHES_AHEAD // 2:
                    os.kill(pid, signal.SIGKILL)
        heal_mesh(mesh)
        found = trained()
        done = int(found["steps 0"])
        assert 4 <= done < 4 + 4 * BATCHES_AHEAD
        assert_trained(found, mesh, [rows] * done)
        step(rows)
        assert_trained(trained(), mesh, [rows] * (done + 1))


@pytest.mark.slow
def test_a_step_is_repeated_after_a_repair_and_one_that_a_rank_did_not_survive_is_undone(replays: list[int]) -> None:
    plain: list[float] = []
    for kills in (False, True):
        with this_host().spawn_procs({"dp": 2}, name="hurt") as procs:
            mesh = Mesh(procs)
            model, optimizer = linear(mesh)
            model.eval()
            pid = procs.status()[1].pid
            step = meshbook.compile(stepping(model, optimizer))
            x = meshbook.randn(6, 4, mesh=mesh, sharding_spec=["dp"]).redistribute([None])
            losses = [step(x).item() for _ in range(6)]
            if kills:
                os.kill(pid, signal.SIGKILL)
                with pytest.raises(DeviceMeshError):
                    step(x).item()
                heal_mesh(mesh)
            losses += [step(x).item() for _ in range(4)]
            plain = plain or losses
            assert losses == plain
    assert len(replays) >= 12


@pytest.mark.slow
def test_a_step_that_lays_tensors_out_anew_is_repeated(square: ProcMesh, replays: list[int]) -> None:
    mesh = Mesh(square)
    weight = meshbook.ones(4, 4, mesh=mesh, sharding_spec=["dp", "tp"]).requires_grad_()

    def step(x: torch.Tensor) -> torch.Tensor:
        turned = (x @ weight.redistribute([None, "dp"])).redistribute(["tp"])
        turned.pow(2).sum().backward()
        assert weight.grad is not None
        found = weight.grad.redistribute([]).sum() + turned.sum()
        weight.grad = None
        return found

    repeated = meshbook.compile(step)
    for at in range(6):
        x = meshbook.full((8, 4), float(at), mesh=mesh, sharding_spec=["dp"])
        assert repeated(x).item() == step(x).item() == 16 * (8 * 8 * at * at) + 8 * 4 * 4 * at
    assert replays and not repeated.why_not


FACTOR = 2.0


def test_what_is_global_counts_in_functions_within_as_well(mesh: Mesh, monkeypatch: pytest.MonkeyPatch) -> None:
    x = meshbook.ones(4, mesh=mesh)
    repeated = meshbook.compile(lambda: [x * FACTOR for _ in range(2)])
    for factor in (2.0, 3.0):
        monkeypatch.setitem(globals(), "FACTOR", factor)
        for _ in range(4):
            assert [each.tolist()[0] for each in repeated()] == [factor] * 2


def test_a_name_that_has_its_value_later_counts_from_then_on(mesh: Mesh, replays: list[int]) -> None:
    x = meshbook.ones(4, mesh=mesh)

    def step() -> torch.Tensor:
        try:
            return x * factor
        except NameError:
            return x + 1

    repeated = meshbook.compile(step)
    assert [repeated().tolist()[0] for _ in range(4)] == [2.0] * 4
    factor = 5.0
    assert [repeated().tolist()[0] for _ in range(4)] == [5.0] * 4
    assert len(replays) == 4


class Scaled:
    def __init__(self) -> None:
        self.config = SimpleNamespace(scale=1.0)

    def step(self, x: torch.Tensor) -> torch.Tensor:
        return x * self.config.scale


CONFIG = SimpleNamespace(scale=1.0)


@pytest.mark.parametrize("kind", ["global", "closure", "item", "method"])
def test_what_is_in_objects_that_the_step_names_counts(mesh: Mesh, replays: list[int], kind: str) -> None:
    x = meshbook.ones(4, mesh=mesh)
    near, flags, owner = SimpleNamespace(scale=1.0), {"f": [1.0]}, Scaled()
    steps: dict[str, Step] = {
        "global": lambda x: x * CONFIG.scale,
        "closure": lambda x: x * near.scale,
        "item": lambda x: x * flags["f"][0],
        "method": owner.step,
    }
    repeated = meshbook.compile(steps[kind])
    for scale in (1.0, 2.0, 3.0):
        CONFIG.scale = near.scale = flags["f"][0] = owner.config.scale = scale
        for _ in range(4):
            assert repeated(x).tolist() == [scale] * 4
    assert len(replays) >= 3


@pytest.mark.slow
def test_gradients_that_the_step_names_are_no_values_of_it(mesh: Mesh, replays: list[int]) -> None:
    weight, x = meshbook.ones(4, mesh=mesh).requires_grad_(), meshbook.ones(4, mesh=mesh)

    def step(x: torch.Tensor) -> torch.Tensor:
        if weight.grad is not None:
            weight.grad.zero_()
        (weight * x).sum().backward()
        assert weight.grad is not None
        return weight.grad.sum()

    repeated = meshbook.compile(step)
    assert [repeated(x).item() for _ in range(8)] == [4.0] * 8
    assert replays and not repeated.why_not
