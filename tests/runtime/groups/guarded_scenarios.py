"""More scenarios for group_ranks.py: every collective, waits that are ended, groups that are formed again."""

from __future__ import annotations

import threading
import time
import warnings
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch
import torch._dynamo  # DDP imports it: once here, not in each rank
import torch.distributed as dist
import torch.distributed._functional_collectives as functional
from group_ranks import Rank, _data_and_model, _train, count, interrupt_main, raised
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Shard, distribute_tensor
from torch.nn.parallel import DistributedDataParallel

from meshbook.errors import GroupAborted, UsageError
from meshbook.groups.rank_groups import RankGroups
from meshbook.groups.work import PeerWork

REASON = "rank 0 raised ValueError"


def numbers(*values: float) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.float)


# ---- every collective ------------------------------------------------------------------------------------------------


def every_collective(me: Rank) -> Any:
    """Each by torch.distributed's own function, on four ranks; every result is computed by hand."""
    warnings.simplefilter("ignore", FutureWarning)  # torch renames its functional collectives
    me.form({"dp": 2, "tp": 2})
    r, ranks = float(me.rank), range(4)
    got: dict[str, bool] = {}
    from_anybody = [torch.zeros(1) for _ in range(3 if me.rank == 0 else 0)]
    for t in from_anybody:
        dist.recv(t)
    if me.rank:
        dist.send(numbers(r), 0)
    got["recv from anybody"] = sorted(t.item() for t in from_anybody) == [1.0, 2.0, 3.0][: len(from_anybody)]

    def same(name: str, tensor: torch.Tensor, *expected: float) -> None:
        got[name] = tensor.flatten().tolist() == list(expected)

    t = numbers(r)
    dist.all_reduce(t)
    same("all_reduce", t, 6)
    t = numbers(r)
    dist.all_reduce(t, dist.ReduceOp.MAX, async_op=True).wait()
    same("all_reduce async", t, 3)
    t = numbers(r)
    dist.reduce(t, 2)
    got["reduce"] = me.rank != 2 or t.item() == 6
    t = numbers(r)
    dist.broadcast(t, 1)
    same("broadcast", t, 1)
    pieces = [torch.zeros(1) for _ in ranks]
    dist.all_gather(pieces, numbers(r))
    same("all_gather", torch.cat(pieces), 0, 1, 2, 3)
    t = torch.zeros(4)
    dist.all_gather_into_tensor(t, numbers(r))
    same("all_gather_into_tensor", t, 0, 1, 2, 3)
    dist.gather(numbers(r), pieces if me.rank == 0 else None, 0)
    same("gather", torch.cat(pieces), 0, 1, 2, 3)
    t = torch.zeros(1)
    dist.scatter(t, [numbers(10.0 * other) for other in ranks] if me.rank == 3 else None, 3)
    same("scatter", t, 10 * r)
    dist.reduce_scatter(t, [numbers(other + r) for other in ranks])
    same("reduce_scatter", t, 4 * r + 6)
    dist.reduce_scatter_tensor(t, torch.arange(4.0) + r)
    same("reduce_scatter_tensor", t, 4 * r + 6)
    dist.all_to_all(pieces, [numbers(10 * r + other) for other in ranks])
    same("all_to_all", torch.cat(pieces), *(10 * other + r for other in ranks))
    t = torch.zeros(4)
    dist.all_to_all_single(t, torch.arange(4.0) + 10 * r)
    same("all_to_all_single", t, *(10 * other + r for other in ranks))
    dist.barrier()
    dist.monitored_barrier(timeout=timedelta(seconds=10))
    left = torch.zeros(2)
    sending = dist.isend(numbers(r, r), (me.rank + 1) % 4)
    source = dist.recv(left, (me.rank - 1) % 4)
    sending.wait()
    same("recv", left, *[float((me.rank - 1) % 4)] * 2)
    ring = [dist.P2POp(dist.isend, numbers(r, -r), (me.rank + 1) % 4), dist.P2POp(dist.irecv, left, (me.rank - 1) % 4)]
    for work in dist.batch_isend_irecv(ring):
        work.wait()
    same("batch", left, (me.rank - 1) % 4, -((me.rank - 1) % 4))
    got["source"] = source == (me.rank - 1) % 4
    box: list[Any] = [{"from": me.rank}]
    dist.broadcast_object_list(box, 2)
    got["objects"] = box == [{"from": 2}] and me.everyone(me.rank) == list(ranks)
    mine: list[Any] = [None]
    dist.scatter_object_list(mine, list("abcd") if me.rank == 0 else None, 0)
    got["scatter objects"] = mine == ["abcd"[me.rank]]
    world = dist.group.WORLD
    same("functional all_reduce", functional.all_reduce(numbers(r), "sum", world), 6)
    same("functional all_gather", functional.all_gather_tensor(numbers(r), 0, world), 0, 1, 2, 3)
    same(
        "functional reduce_scatter", functional.reduce_scatter_tensor(torch.arange(4.0) + r, "sum", 0, world), 4 * r + 6
    )
    same("functional broadcast", functional.broadcast(numbers(r), 3, world), 3)
    swapped = functional.all_to_all_single(torch.arange(4.0) + 10 * r, None, None, world)
    same("functional all_to_all", swapped, *(10 * other + r for other in ranks))
    future = dist.all_reduce(numbers(r), async_op=True).get_future()
    got["future"] = future.wait()[0].item() == 6
    mesh = me.groups.device_mesh(["dp", "tp"], [2, 2])
    sharded = distribute_tensor(torch.arange(16.0).reshape(4, 4), mesh, [Shard(0), Shard(1)])
    same(
        "dtensor",
        (sharded @ sharded.t()).full_tensor().sum(),
        float((torch.arange(16.0).reshape(4, 4).sum(0) ** 2).sum()),
    )
    got["names"] = (dist.get_backend(), dist.get_backend(mesh["tp"].get_group())) == ("gloo", "gloo")
    progress = {group.name: group for group in me.groups.collectives(0).groups}
    return got, progress["0"].issued, progress["0"].sent, progress["0"].received


# ---- waits that are ended --------------------------------------------------------------------------------------------


class Handles:
    """What a user holds across a recovery."""

    def __init__(self, me: Rank) -> None:
        self.mesh = me.groups.device_mesh(["dp", "tp"], [2, 2])
        self.tensor = distribute_tensor(torch.arange(8.0), self.mesh["tp"], [Shard(0)])
        self.evens, self.others = dist.new_group([0, 2]), dist.new_group([1, 2, 3])
        self.own = dist.device_mesh.init_device_mesh("cpu", (4,), mesh_dim_names=("x",))
        torch.manual_seed(0)
        self.ddp = DistributedDataParallel(torch.nn.Linear(2, 2))

    def check(self, me: Rank) -> None:
        """Every handle serves."""
        assert count() == 4
        assert self.tensor.full_tensor().tolist() == list(range(8))
        tp = numbers(1)
        dist.all_reduce(tp, group=self.mesh["tp"].get_group())
        whole = DTensor.from_local(numbers(me.rank), self.own, [Shard(0)]).full_tensor()
        assert (tp.item(), whole.tolist()) == (2, [0, 1, 2, 3])
        for members, group in (((0, 2), self.evens), ((1, 2, 3), self.others)):
            if me.rank in members:
                t = numbers(1)
                dist.all_reduce(t, group=group)
                assert t.item() == len(members)
        self.ddp.zero_grad()
        self.ddp(torch.ones(1, 2) * me.rank).sum().backward()
        gradient = self.ddp.module.weight.grad
        assert gradient is not None and gradient.flatten().tolist() == [1.5] * 4
        peer = me.rank ^ 1
        sending, t = dist.isend(numbers(me.rank), peer), numbers(-1)
        dist.recv(t, peer)
        sending.wait()
        assert t.item() == peer


WAITS: dict[str, Callable[[Rank, Handles], object]] = {
    "all_reduce": lambda me, held: dist.all_reduce(numbers(1)),
    "barrier": lambda me, held: dist.barrier(),
    "monitored_barrier": lambda me, held: dist.monitored_barrier(timeout=timedelta(seconds=60)),
    "recv": lambda me, held: dist.recv(numbers(1), 0),
    "recv from anybody": lambda me, held: dist.recv(numbers(1)),
    "send": lambda me, held: dist.send(torch.ones(1_000_000), 0),
    "object list": lambda me, held: dist.broadcast_object_list([None], 0),
    "sub-group": lambda me, held: dist.all_reduce(numbers(1), group=held.evens if me.rank == 2 else None),
    "axis": lambda me, held: dist.all_reduce(numbers(1), group=held.mesh["dp"].get_group() if me.rank == 2 else None),
    "functional": lambda me, held: functional.all_reduce(numbers(1), "sum", dist.group.WORLD).tolist(),
    "dtensor": lambda me, held: DTensor.from_local(numbers(me.rank), held.own, [Shard(0)]).full_tensor(),
    "backward": lambda me, held: held.ddp(torch.ones(1, 2)).sum().backward(),
    "big": lambda me, held: dist.all_reduce(torch.ones(3_000_000)),
    "new group": lambda me, held: dist.all_reduce(numbers(1), group=dist.new_group([0, 1, 2, 3])),
}


def aborted(me: Rank) -> Any:
    """Rank 0 does not come; the others are freed, form their groups again, and all that they held serves."""
    me.form({"dp": 2, "tp": 2})
    held = Handles(me)
    took = {}
    for epoch, (kind, wait) in enumerate(WAITS.items(), 1):
        started = time.monotonic()
        if me.rank:
            timer = threading.Timer(0.3, me.groups.abort, (epoch - 1, REASON))
            timer.start()
            error = raised(lambda wait=wait: wait(me, held), GroupAborted)  # type: ignore[misc]
            assert REASON in error, f"{kind}: {error}"
            took[kind] = time.monotonic() - started
            assert REASON in raised(count, GroupAborted)
            timer.join()
        else:
            time.sleep(0.5)
        me.form({"dp": 2, "tp": 2}, epoch=epoch)
        if kind == "new group" and me.rank == 0:
            torch.distributed.distributed_c10d._world.group_count += 1  # it did not make the group that others did
        held.check(me)
        told = me.groups.collectives(0)
        assert (told.epoch, told.aborted, told.waiting) == (epoch, "", ()), told
        assert not any(group.broken for group in told.groups), told
    return took


def kept_receives(me: Rank) -> Any:
    """Two receives that an abort has overtaken, the second still behind the first, are waited for much later."""
    me.form()
    if me.rank == 0:
        me.form(epoch=1)
        return count(), []
    receives = [dist.irecv(torch.zeros(2), 0) for _ in range(2)]
    works = [receive for receive in receives if isinstance(receive, PeerWork)]
    me.groups.abort(0, REASON)
    me.form(epoch=1)
    until = time.monotonic() + 10
    while not all(work.ended for work in works) and time.monotonic() < until:
        time.sleep(0.01)
    told = [(work.is_success(), REASON in raised(work.wait, GroupAborted)) for work in works]
    return count(), told


def told_while_waiting(me: Rank) -> Any:
    """What the control thread tells of ranks that wait, DDP's backward included."""
    me.form({"dp": 2, "tp": 2})
    held = Handles(me)
    seen = []
    for kind in ("all_reduce", "recv", "backward"):
        if me.rank:
            threading.Timer(0.3, lambda: seen.append(me.groups.collectives(7))).start()
            threading.Timer(0.5, me.groups.abort, (len(seen), REASON)).start()
            raised(lambda kind=kind: WAITS[kind](me, held), GroupAborted)  # type: ignore[misc]
        else:
            time.sleep(0.8)
            seen.append(me.groups.collectives(0))
        me.form({"dp": 2, "tp": 2}, epoch=len(seen))
    return seen


def interrupted(me: Rank) -> Any:
    """Ranks 1-3 are interrupted where they wait; the groups are formed again, and serve."""
    me.form({"dp": 2, "tp": 2})
    held = Handles(me)
    took = {}
    for epoch, kind in enumerate(("all_reduce", "recv", "object list", "dtensor", "backward"), 1):
        started = time.monotonic()
        if me.rank:
            interrupt_main(0.3)
            threading.Timer(0.4, me.groups.interrupt_backward).start()
            assert raised(lambda kind=kind: WAITS[kind](me, held), KeyboardInterrupt) == ""  # type: ignore[misc]
            took[kind] = time.monotonic() - started
            assert any(group.broken for group in me.groups.collectives(0).groups), kind
        else:
            time.sleep(0.6)
        me.form({"dp": 2, "tp": 2}, epoch=epoch)
        held.check(me)
    return took


def forming_is_aborted(me: Rank) -> Any:
    """Rank 0 comes late: the others wait for it in the store, and are freed there."""
    me.form()
    started = time.monotonic()
    if me.rank:
        threading.Timer(0.3, me.groups.abort, (1, REASON)).start()
        error = raised(lambda: me.form(epoch=1), GroupAborted)
    else:
        time.sleep(0.6)
        me.groups.abort(1, REASON)
        error = raised(lambda: me.form(epoch=1), GroupAborted)
    took = time.monotonic() - started
    me.form(epoch=2)
    return error, took, count()


# ---- modules ---------------------------------------------------------------------------------------------------------


def training_goes_on(me: Rank, kind: str, cut: str) -> Any:
    """An iteration that was cut off on all ranks leaves no trace in DDP and FSDP2 modules."""
    axes = {"replicate": 2, "shard": 2}
    me.form(axes)
    inputs, targets, model = _data_and_model()
    alone = _data_and_model()[2]
    reference = _train(alone, inputs, targets) + _train(alone, inputs, targets)
    share = slice(2 * me.rank, 2 * me.rank + 2)
    if kind == "ddp":
        model = DistributedDataParallel(model)
    else:
        for layer in (model[0], model[2], model):  # type: ignore[index]
            fully_shard(layer, mesh=me.groups.device_mesh(list(axes), list(axes.values())))
    losses = _train(model, inputs[share], targets[share])
    if me.rank:
        threading.Timer(0.5, me.groups.abort, (0, REASON)).start()
        assert REASON in raised(lambda: _train(model, inputs[share], targets[share]), GroupAborted)
    else:
        handle = _raise_in(model, cut)
        assert raised(lambda: _train(model, inputs[share], targets[share]), ValueError) == "bad batch"
        handle.remove()
    me.form(axes, epoch=1)
    losses += _train(model, inputs[share], targets[share])
    means = torch.tensor(me.everyone(losses)).mean(0)
    torch.testing.assert_close(means, torch.tensor(reference))
    return "same"


def _raise_in(model: torch.nn.Module, cut: str) -> Any:
    """Have the next forward or backward pass raise in the middle."""

    def fail(*_: object) -> None:
        raise ValueError("bad batch")

    layer = next(module for module in model.modules() if isinstance(module, torch.nn.ReLU))
    return layer.register_forward_hook(fail) if cut == "forward" else layer.register_full_backward_hook(fail)


# ---- ranks that come anew, meshes that change ------------------------------------------------------------------------


def a_fresh_rank_joins(me: Rank) -> Any:
    """Rank 3 is replaced by a process that knows nothing."""
    me.form({"dp": 2, "tp": 2})
    held = Handles(me)
    names = [group.name for group in me.groups.collectives(0).groups]
    if me.rank == 3:
        dist.destroy_process_group()
        me.groups = RankGroups()
    else:
        me.groups.abort(0, "rank 3 ended")
    me.form({"dp": 2, "tp": 2}, epoch=1)
    mesh = me.groups.device_mesh(["dp", "tp"], [2, 2])
    later = dist.new_group([1, 3])
    sums = []
    for group in (mesh["dp"].get_group(), mesh["tp"].get_group(), *([later] if me.rank in (1, 3) else [])):
        t = numbers(me.rank)
        dist.all_reduce(t, group=group)
        sums.append(t.item())
    whole = DTensor.from_local(numbers(me.rank), mesh["tp"], [Shard(0)]).full_tensor().tolist()
    kept = me.rank == 3 or held.mesh is mesh
    again = [group.name for group in me.groups.collectives(0).groups]
    return count(), sums, whole, kept, set(again) >= set(names), dist.get_backend()


def another_size(me: Rank) -> Any:
    """Rank 3 leaves: handles of the four say what to make again."""
    me.form()
    held, default = dist.new_group([0, 1]), dist.group.WORLD
    if me.rank == 3:
        return None
    me.size = 3
    me.form(epoch=1)
    either: Any = (UsageError, ValueError)
    errors = [raised(lambda: dist.all_reduce(numbers(1), group=default), either)]
    if me.rank < 2:
        errors.append(raised(lambda: dist.barrier(group=held), either))
    return count(), errors
