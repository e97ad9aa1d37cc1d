"""Modules and optimizers on a mesh: the same losses and weights as in one process, whatever is cut."""

from __future__ import annotations

import copy
import os
import signal
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.tensor import Replicate
from transformers_on_meshes import train

import meshbook
from meshbook import DeviceMeshError, errors, heal_mesh, this_host
from meshbook.distributed import Mesh, TensorError, TensorLost, TensorTorn, ViewLost, show_plan


def same(got: Any, wanted: Any) -> bool:
    losses, weights = got
    return losses == pytest.approx(wanted[0], abs=1e-5) and all(
        torch.allclose(weights[name], value, atol=1e-5) for name, value in wanted[1].items()
    )


PLANS = {
    "replicated": None,
    "tensor parallel": {"*.qkv": "column", "*.o": "row"},
    "sharded": {"*": "shard"},
    "2-D": {"*.qkv": [("dp", "tp")], "*.o.weight": [None, "tp"], "0.weight": [None, "tp"]},
}


@pytest.mark.some("tensor parallel")
@pytest.mark.slow
@pytest.mark.parametrize("plan", PLANS)
def test_a_transformer_trains_as_in_one_process(grid: Mesh, plan: str) -> None:
    assert same(train(grid, PLANS[plan], lr=0.05), train(None, lr=0.05))


@pytest.mark.some("AdamW-{'fused': True}")
@pytest.mark.slow
@pytest.mark.parametrize("options", [{}, {"foreach": True}, {"fused": True}], ids=str)
@pytest.mark.parametrize("optimizer", ["SGD", "AdamW", "Adagrad"])
def test_optimizers_step_as_in_one_process(grid: Mesh, optimizer: str, options: dict[str, bool]) -> None:
    got, wanted = (train(mesh, optimizer=optimizer, lr=0.05, **options) for mesh in (grid, None))
    if optimizer == "SGD":  # the others make steps of gradients that are nothing but rounding
        assert same(got, wanted)
    assert got[0] == pytest.approx(wanted[0], abs=1e-5)


MODULES: dict[str, Callable[[], nn.Module]] = {
    "LSTM": lambda: nn.LSTM(8, 8, batch_first=True),
    "GRU": lambda: nn.GRU(8, 8, batch_first=True),
    "encoder": lambda: nn.TransformerEncoderLayer(8, 2, 16, 0.0, batch_first=True),
    "convolution": lambda: nn.Sequential(nn.Conv1d(5, 5, 3), nn.BatchNorm1d(5), nn.GroupNorm(1, 5), nn.SiLU()),
}


@pytest.mark.some("LSTM")
@pytest.mark.slow
@pytest.mark.parametrize("name", MODULES)
def test_modules_of_torch_train_as_in_one_process(grid: Mesh, name: str) -> None:
    losses: dict[bool, list[float]] = {}
    for on_mesh in (True, False):
        torch.manual_seed(5)
        module, batch = MODULES[name](), torch.randn(4, 5, 8)
        if on_mesh:
            module, batch = meshbook.module_to_mesh(module, grid), meshbook.distribute(batch, grid, ["dp"])
        optimizer = torch.optim.Adam(module.parameters(), amsgrad=True)
        losses[on_mesh] = []
        for _ in range(3):
            optimizer.zero_grad()
            made = module(batch)
            loss = (made[0] if isinstance(made, tuple) else made).square().mean()
            loss.backward()
            optimizer.step()
            losses[on_mesh].append(loss.item())
    assert losses[True] == pytest.approx(losses[False], abs=1e-5)


@pytest.mark.some()
@pytest.mark.quick("causal-None")
@pytest.mark.parametrize("spec", [["dp"], ["dp", "tp"], [None, ("dp", "tp")], [None, None, "tp"], None], ids=str)
@pytest.mark.parametrize("how", ["causal", "masked", "heads that share keys"])
def test_attention_is_that_of_one_process(grid: Mesh, how: str, spec: list[Any] | None) -> None:
    torch.manual_seed(7)
    shapes = [(3, 4, 5, 8), (3, 2 if "share" in how else 4, 5, 8), (3, 2 if "share" in how else 4, 5, 8)]
    plain = [torch.randn(shape, requires_grad=True) for shape in shapes]
    mask = torch.rand(5, 5) > 0.3 if how == "masked" else None
    given = [meshbook.distribute(each, grid, spec).requires_grad_() for each in plain]
    made: list[torch.Tensor] = []
    for tensors in (given, plain):
        out = nn.functional.scaled_dot_product_attention(
            *tensors, attn_mask=mask, is_causal=how == "causal", enable_gqa="share" in how
        )
        joined = out.transpose(1, 2).reshape(3, 5, 32)
        joined.square().sum().backward()
        made.append(joined)
    assert torch.allclose(made[0].full_tensor(), made[1], atol=1e-5)
    for got, wanted in zip(given, plain, strict=True):
        assert torch.allclose(got.grad.full_tensor(), wanted.grad, atol=1e-4)


@pytest.mark.quick("True")
@pytest.mark.parametrize("fused", [False, True])
def test_a_scaler_of_gradients_scales_and_leaves_out_steps_as_in_one_process(grid: Mesh, fused: bool) -> None:
    def train(model: nn.Module, x: torch.Tensor) -> tuple[list[float], list[list[float]]]:
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.1, fused=fused)
        scaler = torch.amp.GradScaler("cpu", init_scale=4.0, growth_interval=2)
        scales = []
        for factor in (1.0, 1.0, float("inf"), 1.0):
            optimizer.zero_grad()
            scaler.scale((model(x) * factor).pow(2).mean()).backward()
            if not fused:
                scaler.unscale_(optimizer)
                nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            scaler.step(optimizer)
            scaler.update()
            scales.append(scaler.get_scale())
        return scales, [parameter.tolist() for parameter in model.parameters()]

    torch.manual_seed(1)
    plain, x = nn.Linear(4, 2), torch.randn(6, 4)
    there = meshbook.module_to_mesh(copy.deepcopy(plain), grid)
    scales, values = train(plain, x)
    got, found = train(there, meshbook.distribute(x, grid, ["dp"]))
    assert got == scales and min(scales) < max(scales)
    for one, other in zip(values, found, strict=True):
        torch.testing.assert_close(torch.tensor(one), torch.tensor(other), rtol=1e-4, atol=1e-5)


def test_a_plan_is_shown_with_bytes_per_rank(grid: Mesh) -> None:
    model = nn.ModuleDict({"up": nn.Linear(8, 32), "down": nn.Linear(32, 8)})
    meshbook.module_to_mesh(model, grid, {"up": "column"})
    plan = show_plan(model)
    assert plan._repr_html_().count("<tr") == 6 and "512 B" in plan._repr_html_()
    lines = str(plan).splitlines()
    assert lines == repr(plan).splitlines()
    assert lines[1].split("  ")[0] == "up.weight"
    assert "Replicate(), Shard(dim=0)" in lines[1]
    assert lines[1].endswith("512 B")
    with pytest.raises(errors.UsageError, match=r"no parameter or module is called \*\.qkv"):
        meshbook.module_to_mesh(nn.Linear(2, 2), grid, {"*.qkv": "row"})
    with pytest.raises(errors.UsageError, match="'colum' is no way to cut"):
        meshbook.module_to_mesh(nn.Linear(2, 2), grid, {"*": "colum"})


def train_step(mesh: Mesh, model: nn.Module, optimizer: torch.optim.Optimizer, batch: torch.Tensor) -> float:
    optimizer.zero_grad()
    data = meshbook.distribute(batch, mesh, ["gpus"])
    loss = nn.MSELoss()(model(data), data)
    loss.backward()
    optimizer.step()
    return loss.item()


@pytest.mark.slow
def test_a_repair_of_the_processes_is_one_of_their_tensors(hurt: Mesh) -> None:
    procs = hurt.procs
    rows = meshbook.distribute(torch.arange(8.0), hurt, ["dp"])
    row, across = rows.detach(), rows.view(4, 2).T[1]
    rows.add_(1)
    assert rows.sum().item() == 36.0
    procs.respawn(3)
    assert (rows * 2).tolist() == [2.0 * (value + 1) for value in range(8)]  # rank 2 holds what rank 3 held
    assert (rows.redistribute(["tp"]) @ rows).item() == 204.0
    row.mul_(2)
    assert rows.tolist() == [2.0 * (value + 1) for value in range(8)]
    other = rows.redistribute([None])  # each rank's own: they would disagree
    assert other.placements == (Replicate(), Replicate())
    assert other.sum().item() == 72.0
    assert across.shape == (4,)


@pytest.mark.slow
def test_a_view_across_parts_does_not_outlive_a_repair(hurt: Mesh) -> None:
    x = meshbook.distribute(torch.arange(10.0).view(5, 2), hurt, ["dp"])
    flat = x.view(10)
    assert flat.sum().item() == 45.0
    hurt.procs.respawn(1)
    assert x.sum().item() == 45.0
    with pytest.raises(ViewLost, match="make it again"):
        flat.sum().item()
    assert x.view(10).add_(1).sum().item() == x.sum().item() == 55.0


@pytest.mark.slow
def test_what_was_made_while_a_rank_died_is_whole_after_the_repair(hurt: Mesh) -> None:
    procs = hurt.procs
    x = meshbook.ones(8, mesh=hurt, sharding_spec=["dp"])
    wrong = x[torch.tensor([1, 9])]
    with pytest.raises(TensorError, match="index 9"):
        wrong.tolist()
    ended = procs.slice(dp=1, tp=1).run("import os, time; time.sleep(0.3); os.kill(os.getpid(), 9)")
    made = x.clone()
    made.add_(1)
    with pytest.raises(errors.WorkerLost):
        made.sum().item()
    with pytest.raises(errors.WorkerLost):
        ended.get(20)
    heal_mesh(hurt)
    assert made.tolist() == [2.0] * 8 and x.tolist() == [1.0] * 8
    with pytest.raises(TensorError, match="index 9"):
        wrong.tolist()
    made.add_(1)
    assert made.sum().item() == 24.0


@pytest.mark.slow
def test_training_goes_on_after_a_rank_was_killed_and_healed() -> None:
    torch.manual_seed(2)
    batches = [torch.randn(8, 16) for _ in range(6)]
    plain = nn.Sequential(nn.Linear(16, 16), nn.GELU(), nn.Linear(16, 16))
    with this_host().spawn_procs({"gpus": 4}, name="hurt") as procs:
        mesh = Mesh(procs)
        model = nn.Sequential(nn.Linear(16, 16), nn.GELU(), nn.Linear(16, 16))
        model.load_state_dict(plain.state_dict())
        meshbook.module_to_mesh(model, mesh)
        optimizer = torch.optim.AdamW(model.parameters())
        cut = meshbook.distribute(torch.arange(8.0), mesh, ["gpus"])
        losses = []
        for number, batch in enumerate(batches):
            if number == 3:
                os.kill(procs.status()[2].pid, signal.SIGKILL)
                with pytest.raises(DeviceMeshError):
                    train_step(mesh, model, optimizer, batch)
                heal_mesh(mesh)
            losses.append(train_step(mesh, model, optimizer, batch))
        with pytest.raises(TensorLost, match="the part of rank 2 ended"):
            cut.sum().item()
    wanted = []
    optimizer = torch.optim.AdamW(plain.parameters())
    for batch in batches:
        optimizer.zero_grad()
        loss = nn.MSELoss()(plain(batch), batch)
        loss.backward()
        optimizer.step()
        wanted.append(loss.item())
    assert losses == pytest.approx(wanted, abs=1e-5)


@pytest.mark.slow
def test_what_some_ranks_had_written_when_another_ended_is_refused_after_the_repair(hurt: Mesh) -> None:
    procs = hurt.procs
    x, alike = (meshbook.zeros(4, 4, mesh=hurt, sharding_spec=[None, spec]) for spec in ("tp", None))
    cut = meshbook.ones(4, 4, mesh=hurt, sharding_spec=["dp", "tp"])
    row, behind = x[0], meshbook.zeros(4, 4, mesh=hurt, sharding_spec=[None, "tp"])
    view_alone = behind[1:]
    assert view_alone.sum().item() + x.sum().item() + alike.sum().item() + cut.sum().item() == 16.0
    ended = procs.slice(dp=1, tp=1).run("import os, time; time.sleep(0.5); os.kill(os.getpid(), 9)")
    cut.redistribute([None, "tp"])  # in which one of the ranks that live waits for the one that does not
    for each in (x, alike, behind):
        each.add_(1)
    del behind, each
    for future in (x.sum().item, lambda: ended.get(20)):
        with pytest.raises(errors.WorkerLost):
            future()
    for _ in range(2):
        heal_mesh(hurt)
        for each in (x, row, view_alone):
            with pytest.raises(TensorTorn, match="newer than others"):
                each.tolist()
        assert alike.full_tensor().unique().tolist() in ([0.0], [1.0])
        os.kill(procs.status()[3].pid, signal.SIGKILL)
        with pytest.raises(errors.WorkerLost):
            alike.sum().item()
    heal_mesh(hurt)
    x.zero_()
    assert x.add_(1).tolist() == [[1.0] * 4] * 4 and row.tolist() == [1.0] * 4
    with pytest.raises(TensorTorn):
        view_alone.tolist()
    assert view_alone.zero_().tolist() == [[0.0] * 4] * 3


@pytest.mark.slow
def test_an_optimizer_steps_after_a_repair_that_ended_a_view_of_a_gradient(hurt: Mesh) -> None:
    procs = hurt.procs
    weight = nn.Parameter(meshbook.ones(4, 4, mesh=hurt, sharding_spec=[None, "tp"]))
    optimizer = torch.optim.SGD([weight], lr=0.5)
    weight.grad = meshbook.ones(4, 4, mesh=hurt, sharding_spec=[None, "dp"])
    across = weight.grad.view(16)
    assert across.sum().item() == 16.0
    os.kill(procs.status()[3].pid, signal.SIGKILL)
    with pytest.raises(DeviceMeshError):
        (weight + 1).sum().item()
    heal_mesh(hurt)
    optimizer.step()
    assert weight.tolist() == [[0.5] * 4] * 4


MASKS: dict[str, Callable[[], dict[str, torch.Tensor]]] = {
    "nothing": dict,
    "padding": lambda: {"src_key_padding_mask": torch.tensor([[False] * 6, [False] * 4 + [True] * 2, [False] * 6])},
    "padding within": lambda: {"src_key_padding_mask": torch.tensor([[False, True, *[False] * 4]] * 3)},
    "places": lambda: {"mask": torch.ones(6, 6, dtype=torch.bool).triu(1)},
    "both": lambda: {**MASKS["padding"](), **MASKS["places"]()},
}


@pytest.mark.some("padding within-True")
@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
@pytest.mark.parametrize("norm_first", [False, True])
@pytest.mark.parametrize("masked", MASKS)
def test_an_encoder_is_evaluated_as_in_one_process(grid: Mesh, masked: str, norm_first: bool) -> None:
    torch.manual_seed(4)
    layer = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True, norm_first=norm_first)
    plain, x = nn.TransformerEncoder(layer, 2, enable_nested_tensor=not norm_first).eval(), torch.randn(3, 6, 8)
    model = meshbook.module_to_mesh(copy.deepcopy(plain), grid, {"*": "shard"})
    masks = MASKS[masked]()
    with torch.no_grad():
        wanted = plain(x, **masks)
        given = {name: meshbook.distribute(mask, grid) for name, mask in masks.items()}
        assert torch.allclose(model(meshbook.distribute(x, grid, ["dp"]), **given).full_tensor(), wanted, atol=1e-5)


@pytest.mark.parametrize("need_weights", [False, True])
def test_attention_of_torch_is_evaluated_as_in_one_process(grid: Mesh, need_weights: bool) -> None:
    plain, x = nn.MultiheadAttention(8, 2, batch_first=True).eval(), torch.randn(3, 6, 8)
    model = meshbook.module_to_mesh(copy.deepcopy(plain), grid, {"*": "shard"})
    y = meshbook.distribute(x, grid, ["dp"])
    with torch.no_grad():
        wanted, got = plain(x, x, x, need_weights=need_weights), model(y, y, y, need_weights=need_weights)
    for each, other in zip(got, wanted, strict=True):
        assert (other is None and each is None) or torch.allclose(each.full_tensor(), other, atol=1e-5)


@pytest.mark.some("True")
@pytest.mark.slow
@pytest.mark.parametrize("batch_first", [False, True])
def test_sequences_of_unequal_lengths_are_packed_and_padded(grid: Mesh, batch_first: bool) -> None:
    plain, x = nn.GRU(5, 6, batch_first=batch_first), torch.randn(4, 4, 5)
    model = meshbook.module_to_mesh(copy.deepcopy(plain), grid)
    found: list[list[torch.Tensor]] = []
    for module, batch in ((plain, x.clone()), (model, meshbook.distribute(x, grid, ["dp"]))):
        batch.requires_grad_()
        packed = nn.utils.rnn.pack_padded_sequence(
            batch, torch.tensor([2, 4, 1, 3]), batch_first=batch_first, enforce_sorted=False
        )
        made, last = module(packed)
        padded, lengths = nn.utils.rnn.pad_packed_sequence(
            made, batch_first=batch_first, padding_value=-1.0, total_length=5
        )
        padded.square().sum().backward()
        assert batch.grad is not None
        found.append([padded, last, lengths, batch.grad, *(each.grad for each in module.parameters())])
    for wanted, got in zip(*found, strict=True):
        got = got.full_tensor() if isinstance(got, meshbook.MeshTensor) else got
        assert torch.allclose(got, wanted, atol=1e-5)


def test_statistics_that_a_module_keeps_are_kept(grid: Mesh) -> None:
    torch.manual_seed(3)
    plain, batch = nn.BatchNorm1d(4), torch.randn(6, 4)
    model = meshbook.module_to_mesh(nn.BatchNorm1d(4), grid)
    for spec in (None, ["dp"], [None, "tp"]):
        wanted, got = plain(batch), model(meshbook.distribute(batch, grid, spec))
        assert torch.allclose(got.full_tensor(), wanted, atol=1e-5)
    for name, value in plain.state_dict().items():
        assert torch.allclose(model.state_dict()[name].full_tensor(), value, atol=1e-5), name


def _collectives_so_far() -> int:
    import torch.distributed as dist

    return sum(getattr(group, "issued", 0) for group in dist.distributed_c10d._world.pg_map)


@pytest.mark.slow
def test_gradients_are_summed_together(grid: Mesh) -> None:
    torch.manual_seed(0)
    plain = nn.Sequential(*[nn.Linear(8, 8) for _ in range(12)])
    model = meshbook.module_to_mesh(copy.deepcopy(plain), grid)
    x = torch.randn(6, 8)
    spread = meshbook.distribute(x, grid, [tuple(grid.axes), None])
    optimizers = [torch.optim.SGD(each.parameters(), lr=0.1) for each in (plain, model)]
    for each, given in ((plain, x), (model, spread)):
        each(given).pow(2).sum().backward()
    grid.stream.settle()
    before = grid.procs.execute(_collectives_so_far).get(60)
    for optimizer in optimizers:
        optimizer.step()
    grid.stream.settle()
    after = grid.procs.execute(_collectives_so_far).get(60)
    used = [b - a for a, b in zip(before.values(), after.values(), strict=True)]
    assert 2 <= max(used) < 12, used  # of 24 gradients
    for mine, its in zip(model.parameters(), plain.parameters(), strict=True):
        assert torch.allclose(mine.full_tensor(), its, atol=1e-6)
        assert torch.allclose(mine.grad.full_tensor(), its.grad, atol=1e-6)
