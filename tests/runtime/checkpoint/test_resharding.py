"""What ranks hold is saved and restored, to the bit on as many ranks and by its meaning on another number."""

from __future__ import annotations

import textwrap
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save

import meshbook
from meshbook import ProcMesh, this_host

BEGIN = """
import collections, datetime, random
import meshbook, numpy, torch
from torch import nn
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor, init_device_mesh
from torch.nn.parallel import DistributedDataParallel as DDP

def net(width=8):
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(width, 16), nn.ReLU(), nn.Linear(16, 1))

def train(model, opt, steps, rows=None):
    for _ in range(steps):
        rows = torch.randn(4, 8) if rows is None else rows
        loss = model(rows).pow(2).mean()
        opt.zero_grad()
        loss.backward()
        opt.step()
    return loss.item()
"""


@pytest.fixture(scope="module")
def meshes(clean_end: None) -> Iterator[dict[int, ProcMesh]]:
    """Meshes of two, four and eight ranks."""
    found = {size: this_host().spawn_procs({"gpus": size}, name=f"of{size}", device="cpu") for size in (2, 4, 8)}
    for mesh in found.values():
        mesh.run(BEGIN).get(60)
    yield found
    for mesh in found.values():
        mesh.stop()


def run(mesh: ProcMesh, folder: Path, code: str) -> list[Any]:
    """Run code on all ranks, with the folder as ``d``; return the values of its last line."""
    return list(mesh.run(f"d = {str(folder)!r}\n{textwrap.dedent(code)}").get(60).values())


def test_a_run_goes_on_to_the_bit(meshes: dict[int, ProcMesh], tmp_path: Path) -> None:
    made = """
        model = DDP(net())
        opt = torch.optim.AdamW(model.parameters(), lr=1e-2)
        sched = torch.optim.lr_scheduler.StepLR(opt, 2)
        shuffle, draws = torch.Generator(), numpy.random.default_rng(rank)
        state = {"model": model, "opt": opt, "sched": sched, "losses": [], "step": 0, "g": shuffle, "draws": draws}
        losses = state["losses"]
        def go_on(steps):
            for _ in range(steps):
                losses.append(train(model, opt, 1))
                losses.append((torch.randn(1, generator=shuffle).item(), draws.random()))
                losses.append((random.random(), numpy.random.rand()))
                sched.step()
                state["step"] += 1
    """
    run(meshes[4], tmp_path, made)
    wanted = run(
        meshes[4],
        tmp_path,
        """
        torch.manual_seed(rank)
        go_on(3)
        meshbook.save(d, state)
        go_on(3)
        list(losses), sched.get_last_lr(), [each.tolist() for each in model.parameters()]
        """,
    )
    assert wanted[0][0] != wanted[1][0]
    for begin in ("", made):  # over what is there, and in new objects
        run(meshes[4], tmp_path, begin)
        run(meshes[4], tmp_path, "saved = meshbook.restore(d, state)")
        assert (
            run(meshes[4], tmp_path, "state['step'], saved.step, saved.notes, losses is state['losses']")
            == [(3, 3.0, (), True)] * 4
        )
        found = run(
            meshes[4],
            tmp_path,
            "go_on(3); list(losses), sched.get_last_lr(), [each.tolist() for each in model.parameters()]",
        )
        assert found == wanted


@pytest.mark.parametrize("size", [2, 8])
def test_a_replica_goes_on_with_another_number_of_ranks(meshes: dict[int, ProcMesh], tmp_path: Path, size: int) -> None:
    made = """
        model = DDP(net())
        opt = torch.optim.AdamW(model.parameters(), lr=1e-2)
        rows = torch.linspace(-1, 1, 32).view(4, 8)
    """
    wanted = run(
        meshes[4],
        tmp_path,
        made
        + "    train(model, opt, 3, rows); meshbook.save(d, {'model': model, 'opt': opt}); train(model, opt, 3, rows)",
    )
    found = run(
        meshes[size],
        tmp_path,
        made + "    meshbook.restore(d, {'model': model, 'opt': opt}); train(model, opt, 3, rows)",
    )
    assert len(found) == size and found == pytest.approx([wanted[0]] * size, rel=1e-6)


def test_fully_sharded_and_tensor_parallel_states_are_cut_anew(meshes: dict[int, ProcMesh], tmp_path: Path) -> None:
    made = """
        from torch.distributed.fsdp import fully_shard
        model = net()
        fully_shard(model)
        opt = torch.optim.AdamW(model.parameters(), lr=1e-2)
        dm = init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("tp",))
        wide = distribute_tensor(torch.arange(70.0).view(10, 7), dm, [Shard(0)])
        rows = torch.linspace(-1, 1, 32).view(4, 8)
        state = {"model": model, "opt": opt, "wide": wide}
    """
    wanted = run(
        meshes[4],
        tmp_path,
        made + "    train(model, opt, 3, rows); meshbook.save(d, state); train(model, opt, 2, rows)",
    )
    for size in (2, 8):
        found = run(
            meshes[size],
            tmp_path,
            made
            + """
        wide.zero_()
        meshbook.restore(d, state)
        train(model, opt, 2, rows), wide.full_tensor().sum().item()
        """,
        )
        assert [loss for loss, _ in found] == pytest.approx([wanted[0]] * size, rel=1e-6)
        assert {total for _, total in found} == {sum(range(70))}
    other = """
        dm = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
        wide = distribute_tensor(torch.zeros(10, 7), dm, [Shard(1), Shard(0)])
        meshbook.restore(d, {"wide": wide})
        torch.equal(wide.full_tensor(), torch.arange(70.0).view(10, 7)), tuple(wide.to_local().shape)
    """
    assert run(meshes[4], tmp_path, other) == [(True, (5, 4)), (True, (5, 4)), (True, (5, 3)), (True, (5, 3))]
    plain = """
        model = net()
        before = model[0].weight.clone()
        meshbook.restore(d, {"model": model})
        before.ne(model[0].weight).any().item()
    """
    assert run(meshes[2], tmp_path, plain) == [True, True]


def test_what_differs_between_ranks_goes_back_to_its_rank(meshes: dict[int, ProcMesh], tmp_path: Path) -> None:
    made = """
        def make(number):
            global state, norm, stage
            norm = nn.BatchNorm1d(2)
            norm.running_mean.fill_(number)
            stage = nn.Linear(2 + rank % 2, 3) if rank < 2 else nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 1))
            for each in stage.parameters():
                nn.init.constant_(each, number)
            swapped = torch.zeros(1 << 18)
            swapped[2 * number] = 1  # the same numbers in another place
            state = {"norm": norm, "stage": stage, "own": number, "swapped": swapped}
            state["tensor"] = torch.full((number,), 1.0)
            state["seen"] = {"last": torch.tensor(number), "list": [number] * number}
            state["seen"].update({1: torch.tensor(1), "1": torch.tensor(2)})
            state["head"] = nn.Linear(1, number) if rank == 3 else None
            if rank == 1:
                state["here alone"] = number
            return state
    """
    run(meshes[4], tmp_path, made + "    meshbook.save(d, make(rank))")
    found = run(
        meshes[4],
        tmp_path,
        """
        made = make(9)
        made["head"] = nn.Linear(1, 3) if rank == 3 else None
        saved = meshbook.restore(d, made)
        same = made["swapped"][2 * rank].item(), made["swapped"].sum().item()
        seen = made["seen"]
        places = seen["last"].item(), seen["list"], seen[1].item(), seen["1"].item()
        own = norm.running_mean[0].item(), [each.mean().item() for each in stage.parameters()][0], made["own"]
        saved.notes, own, places, same, tuple(made["tensor"].shape), made.get("here alone")
        """,
    )
    for rank, each in enumerate(found):
        own = (float(rank), float(rank), rank)
        assert each == ((), own, (rank, [rank] * rank, 1, 2), (1.0, 1.0), (rank,), 1 if rank == 1 else None)
    norms = """
        norm = nn.BatchNorm1d(2)
        values = {"norm": norm, "own": -1}
        saved = meshbook.restore(d, values)
        norm.running_mean[0].item(), values["own"], saved.notes
    """
    for size in (2, 8):
        found = run(meshes[size], tmp_path, norms)
        assert [(mean, own) for mean, own, _ in found[:2]] == [(0.0, 0), (1.0, 1)]
        assert [(mean, own) for mean, own, _ in found[4:]] == [(0.0, -1)] * (size - 4 if size > 4 else 0)
        notes = "\n".join(found[0][2])
        assert ("ranks 2,3: not restored" if size == 2 else "ranks 4-7: that of rank 0") in notes, notes


def test_every_kind_of_value_comes_back(meshes: dict[int, ProcMesh], tmp_path: Path) -> None:
    made = """
        class Sampler:
            def __init__(self):
                self.at = 0
            def state_dict(self):
                return collections.OrderedDict(at=self.at, order=torch.arange(3) + self.at)
            def load_state_dict(self, known):
                self.at, self.order = known["at"], known["order"]
        Pair = collections.namedtuple("Pair", "a b")
        torch.manual_seed(1)
        half = torch.randn(5).to(torch.bfloat16)
        flat, empty, number = torch.randn(1).expand(4), torch.empty(0, 3), torch.tensor(7)
        turned, numbers = torch.randn(3, 5).t(), torch.randn(3, dtype=torch.complex64).conj()
        array, counts = numpy.arange(6.0).reshape(2, 3), collections.Counter("abba")
        today, names = datetime.date(2026, 1, 2), {"b", "a"}
        tied = net()
        tied[2].weight = nn.Parameter(torch.randn(1, 16)); tied.again = tied[2]
        bare = torch.randn(3, requires_grad=True)
        sgd = torch.optim.SGD([bare], lr=0.1, momentum=0.9)
        bare.pow(2).sum().backward(); sgd.step()
        first, second = nn.Linear(2, 2), nn.Linear(2, 2)
        both = torch.optim.Adam([*first.parameters(), *second.parameters()])
        (first(torch.ones(1, 2)) + 3 * second(torch.ones(1, 2))).sum().backward(); both.step()
        scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
        sampler = Sampler(); sampler.at = 4
        layer = tied[0]
        for p in tied.parameters(): pass
        kept = [torch.ones(2), {"x": torch.zeros(1)}]
        names_of = ("half flat empty number turned numbers array counts today names tied bare sgd first second both "
                    "scaler sampler layer p kept").split()
        state = {name: globals()[name] for name in names_of}
    """
    run(meshes[2], tmp_path, made + "    s = meshbook.save(d, state)")
    found = run(
        meshes[2],
        tmp_path,
        """
        def flatten(value):
            if isinstance(value, nn.Module): return {key: flatten(each) for key, each in value.state_dict().items()}
            if isinstance(value, torch.Tensor):
                return value.dtype, tuple(value.shape), value.detach().resolve_conj().tolist()
            if isinstance(value, torch.optim.Optimizer): return flatten(value.state_dict())
            if isinstance(value, dict): return type(value).__name__, {key: flatten(each) for key, each in value.items()}
            if isinstance(value, (list, tuple)): return [flatten(each) for each in value]
            if hasattr(value, "state_dict"): return flatten(value.state_dict())
            return value.tolist() if isinstance(value, numpy.ndarray) else value
        wanted = {name: flatten(value) for name, value in state.items()}
        with torch.no_grad():
            for name, value in list(state.items()):
                if isinstance(value, nn.Module): [each.zero_() for each in value.parameters()]
                elif isinstance(value, torch.optim.Optimizer): value.state.clear()
                elif name in ("bare", "turned", "half", "number"): value.zero_()
                elif name in ("flat", "array", "today", "names", "empty"): state[name] = None
        counts.clear(); kept.clear(); sampler.at = 0; scaler.load_state_dict({**scaler.state_dict(), "scale": 1.0})
        saved = meshbook.restore(d, state)
        again = {name: flatten(value) for name, value in state.items()}
        wrong = [(name, wanted[name], again[name]) for name in names_of if again[name] != wanted[name]]
        aliases = state["kept"] is kept, state["counts"] is counts, sgd.param_groups[0]["params"][0] is bare
        wrong, aliases, sampler.order.tolist(), sorted(saved.manifest.kinds), saved.notes
        """,
    )
    kinds = (
        "_random array bare both counts empty first flat half kept names number numbers sampler scaler second sgd tied "
        "today turned"
    )
    assert found == [([], (True, True, True), [4, 5, 6], kinds.split(), ())] * 2


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_other_programs_read_it(meshes: dict[int, ProcMesh], tmp_path: Path) -> None:
    run(
        meshes[4], tmp_path, "model = DDP(net()); meshbook.save(d, {'model': model, 'w': torch.arange(5.0), 'step': 3})"
    )
    whole = {"model.0.weight": torch.zeros(16, 8), "w": torch.zeros(5)}
    dcp.load(whole, checkpoint_id=tmp_path / "save-1", no_dist=True)
    torch.manual_seed(0)
    assert torch.equal(whole["model.0.weight"], torch.nn.Linear(8, 16).weight)
    assert whole["w"].tolist() == [0, 1, 2, 3, 4]
    dcp_to_torch_save(tmp_path / "save-1", tmp_path / "whole.pt")
    one = torch.load(tmp_path / "whole.pt", weights_only=False)
    assert torch.equal(one["model.0.weight"], whole["model.0.weight"])


def test_safetensors_are_plain_files(meshes: dict[int, ProcMesh], tmp_path: Path) -> None:
    safetensors = pytest.importorskip("safetensors.torch")
    made = "from torch.distributed.fsdp import fully_shard; model = net(); fully_shard(model); w = torch.arange(5.0)\n"
    run(meshes[4], tmp_path, made + "meshbook.save(d, {'model': model, 'w': w}, format='safetensors')")
    torch.manual_seed(0)
    plain = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.ReLU(), torch.nn.Linear(16, 1))
    known = {}
    for file in (tmp_path / "save-1").glob("*.safetensors"):
        known.update(safetensors.load_file(file))
    assert known.pop("w").tolist() == [0, 1, 2, 3, 4]
    assert known.keys() == {f"model.{key}" for key in plain.state_dict()}
    assert all(torch.equal(known[f"model.{key}"], value) for key, value in plain.state_dict().items())
    back = """
        [each.zero_() for each in model.state_dict().values()]; w.zero_()
        meshbook.restore(d, {"model": model, "w": w})
        w.tolist(), model[0].weight.full_tensor().tolist()
    """
    assert run(meshes[2], tmp_path, made + textwrap.dedent(back)) == [([0, 1, 2, 3, 4], plain[0].weight.tolist())] * 2


def test_saves_that_are_not_due_are_left_out_and_the_last_ones_are_kept(
    meshes: dict[int, ProcMesh], tmp_path: Path
) -> None:
    code = """
        told = []
        for step in range(6):
            future = meshbook.save(d, {"step": step}, every=2, keep=2, wait=False)
            told.append(None if future is None else future.get(30).step)
        told
    """
    assert run(meshes[2], tmp_path, code) == [[None, 1.0, None, 3.0, None, 5.0]] * 2
    assert sorted(path.name for path in tmp_path.iterdir()) == ["save-2", "save-3"]
    assert (
        run(meshes[2], tmp_path, "s = meshbook.restore(d, {'step': 0}, step=3); s.step, s.values")
        == [(3.0, {"step": 3})] * 2
    )
    code = "[meshbook.save(d, {'x': 1}, every=datetime.timedelta(hours=hours)) is None for hours in (1, 0, 1)]"
    assert run(meshes[2], tmp_path / "timed", code) == [[True, False, True]] * 2


def test_ranks_go_on_while_a_save_is_written(meshes: dict[int, ProcMesh], tmp_path: Path) -> None:
    code = """
        x = torch.ones(1 << 20)
        future = meshbook.save(d, {"x": x}, wait=False)
        x.zero_()
        saved = future.get(60)
        meshbook.restore(d, {"x": x})
        x.sum().item()
    """
    assert run(meshes[2], tmp_path, code) == [float(1 << 20)] * 2


def test_a_dtensor_that_is_not_there_is_told(meshes: dict[int, ProcMesh], tmp_path: Path) -> None:
    run(meshes[4], tmp_path, "wide = distribute_tensor(torch.arange(10.0), mesh, [Shard(0)])")
    meshbook.save(tmp_path, procs=meshes[4])
    run(meshes[4], tmp_path, "del wide")
    assert (
        "wide of ranks 0-3: not restored, since it is not there; make it again"
        in meshbook.restore(tmp_path, procs=meshes[4]).notes
    )
    run(meshes[4], tmp_path, "wide = distribute_tensor(torch.zeros(10), mesh, [Replicate()])")
    meshbook.restore(tmp_path, procs=meshes[4])
    assert run(meshes[4], tmp_path, "wide.to_local().tolist() == [*range(10)]") == [True] * 4


def test_parameters_in_a_list_stay_those_of_the_model(meshes: dict[int, ProcMesh], tmp_path: Path) -> None:
    code = """
        model = net()
        state = {"model": model, "trained": list(model.parameters())}
        trained = state["trained"]
        meshbook.save(d, state)
        meshbook.restore(d, state)
        [each is its for each, its in zip(trained, model.parameters(), strict=True)]
    """
    assert run(meshes[2], tmp_path, code) == [[True] * 4] * 2
