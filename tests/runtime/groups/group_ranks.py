"""Ranks for test_process_group.py: a process that has imported torch forks them, and they run the scenarios below.

``python -W error group_ranks.py FD``. FD is a unix socket; each request names a scenario and how many ranks, followed
by one socket per rank. On its socket a rank asks the store, which the test serves, and then says how it ended:
``[b"store", (id, StoreOp)]`` and ``[b"ended", pickle]``; the store answers with ``[(id, StoreResult)]``.
"""

from __future__ import annotations

import contextlib
import faulthandler
import functools
import gc
import io
import itertools
import os
import pickle
import queue
import signal
import socket
import sys
import threading
import time
import traceback
import warnings
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import msgspec
import torch
import torch.distributed as dist
import torch.distributed.tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

from meshbook.errors import MeshError
from meshbook.groups import factory, rank_groups
from meshbook.groups.broadcast import broadcast_value
from meshbook.groups.rank_groups import RankGroups
from meshbook.groups.store_client import LinkStore
from meshbook.system.processes import thread_count
from meshbook.wire.frames import FrameSocket
from meshbook.wire.kv_store import StoreOp, StoreResult
from meshbook.wire.messages import Identity

encode = msgspec.msgpack.Encoder().encode
decode_result = msgspec.msgpack.Decoder(tuple[int, StoreResult]).decode

RANK_DEADLINE_S = 60


class Rank:
    """One rank: its link to the store, its groups."""

    def __init__(self, rank: int, size: int, sock: socket.socket) -> None:
        self.rank, self.size = rank, size
        self.groups = RankGroups()
        self.asking_threads: set[int] = set()
        self._frames, self._lock = FrameSocket(sock), threading.Lock()
        self._ids, self._waiting = itertools.count(1), dict[int, queue.SimpleQueue[StoreResult]]()
        threading.Thread(target=self._receive, daemon=True).start()

    def rpc(self, op: StoreOp, timeout_s: float, answer: queue.SimpleQueue[StoreResult]) -> StoreResult:
        self.asking_threads.add(threading.get_ident())
        request = next(self._ids)
        self._waiting[request] = answer
        try:
            self.send(b"store", encode((request, op)))
            return answer.get(timeout=timeout_s)
        except queue.Empty:
            raise TimeoutError(f"no answer to {op.op}") from None
        finally:
            del self._waiting[request]

    def send(self, *frames: bytes) -> None:
        with self._lock:
            self._frames.send(frames)

    def _receive(self) -> None:
        while (frames := self._frames.receive()) is not None:
            request, result = decode_result(frames[0])
            if (waiting := self._waiting.get(request)) is not None:
                waiting.put(result)

    def place(self, axes: dict[str, int] | None = None) -> Identity:
        axes = axes or {"gpus": self.size}
        names, sizes = tuple(axes), tuple(axes.values())
        return Identity(
            1, "mesh", "here", "cpu", self.rank, self.size, self.rank, self.size, 0, 1, names, sizes, threads=1
        )

    def form(self, axes: dict[str, int] | None = None, *, epoch: int = 0, **options: Any) -> None:
        self.groups.form(self.rpc, self.place(axes), epoch=epoch, **options)

    def everyone(self, value: object) -> list[Any]:
        """The values of all ranks, by a collective."""
        values = [None] * dist.get_world_size()
        dist.all_gather_object(values, value)
        return values


def count() -> float:
    """What an all_reduce of ones comes to."""
    ones = torch.ones(3)
    dist.all_reduce(ones)
    return float(ones[2])


def raised(call: Callable[[], object], kind: type[BaseException] = MeshError) -> str:
    try:
        call()
    except kind as error:
        return str(error)
    return "nothing was raised"


def interrupt_main(after_s: float) -> None:
    threading.Timer(after_s, os.kill, (os.getpid(), signal.SIGINT)).start()


# ---- forming ---------------------------------------------------------------------------------------------------------


def world(me: Rank) -> Any:
    hook = sys.excepthook
    me.form()
    evens = dist.new_group([0, 2])
    ours = torch.full((1,), float(me.rank))
    if me.rank in (0, 2):
        dist.all_reduce(ours, group=evens)
    names = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "GROUP_RANK", "MASTER_ADDR", "MASTER_PORT")
    return {
        "count": count(),
        "evens": ours.item(),
        "backend": dist.get_backend(),
        "environment": {name: os.environ[name] for name in names},
        "excepthook kept": sys.excepthook is hook,
        "axes": me.groups.device_mesh(["gpus"], [me.size]).mesh_dim_names,
        "threads of C++ asked the store": len(me.asking_threads) > 1,
    }


def eager_gloo(me: Rank) -> Any:
    os.environ["TORCH_GLOO_LAZY_INIT"] = "0"
    me.form({"dp": 2, "tp": 2})
    return count(), len(me.asking_threads)


def missing_rank(me: Rank) -> Any:
    if me.rank == 2:
        return ""
    return raised(lambda: me.form(timeout_s=2.0))


def rank_lost_before_the_proof(me: Rank) -> Any:
    if me.rank == 1:
        me.groups.prepare(me.rpc, me.place(), epoch=0)
        return ""
    error = raised(lambda: me.form(timeout_s=2.0))
    return error if not me.groups.formed else "a group was left"


def interrupted_then_formed(me: Rank) -> Any:
    if me.rank < 2:
        interrupt_main(0.3)
        started = time.monotonic()
        assert raised(me.form, KeyboardInterrupt) == ""
        assert 0.1 < time.monotonic() - started < 2
    me.form(epoch=1)
    return count()


def formed_again(me: Rank) -> Any:
    me.form({"dp": 2, "tp": 2}, epoch=3)
    before = me.groups.device_mesh(["dp", "tp"], [2, 2])
    sharded = distribute_tensor(torch.arange(8.0), before["tp"], [Shard(0)])
    stale = raised(lambda: RankGroups.form(me.groups, me.rpc, me.place(), epoch=3), ValueError)
    me.form({"dp": 2, "tp": 2}, epoch=4)
    return stale, count(), sharded.full_tensor().sum().item(), before is me.groups.device_mesh(["dp", "tp"], [2, 2])


def closed(me: Rank) -> Any:
    me.form()
    store = dist.PrefixStore("user", LinkStore(me.rpc))
    store.set("k", "v")
    me.groups.close()
    me.groups.close()
    return dist.is_initialized(), raised(me.groups.require), store.get("k")


# ---- device meshes, and what is built on them ------------------------------------------------------------------------


def two_axes(me: Rank) -> Any:
    me.form({"dp": 2, "tp": 2})
    mesh = me.groups.device_mesh(["dp", "tp"], [2, 2])
    sums = {}
    for axis in ("dp", "tp"):
        mine = torch.tensor([float(me.rank)])
        dist.all_reduce(mine, group=mesh[axis].get_group())
        sums[axis] = mine.item()
    renamed = me.groups.device_mesh(["replica", "shard"], [2, 2])
    flat = me.groups.device_mesh(["rank"], [4])
    later = dist.new_group(list(range(4)))  # hangs where ranks have counted their groups differently
    dist.barrier(later)
    return {
        "sums": sums,
        "coordinate": mesh.get_coordinate(),
        "shares groups": renamed["shard"].get_group() is mesh["tp"].get_group(),
        "flat is the world": flat.get_group() is dist.group.WORLD,
        "same object": me.groups.device_mesh(["dp", "tp"], [2, 2]) is mesh,
        "wrong sizes": raised(lambda: me.groups.device_mesh(["a", "b"], [2, 3])),
        "flattened": mesh._flatten().size() if hasattr(mesh, "_flatten") else 4,
    }


def _data_and_model() -> tuple[torch.Tensor, torch.Tensor, torch.nn.Module]:
    torch.manual_seed(1)
    inputs, targets = torch.randn(8, 5), torch.randn(8, 2)
    return inputs, targets, torch.nn.Sequential(torch.nn.Linear(5, 7), torch.nn.ReLU(), torch.nn.Linear(7, 2))


def _train(model: torch.nn.Module, inputs: torch.Tensor, targets: torch.Tensor) -> list[float]:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    losses = []
    for _ in range(3):
        optimizer.zero_grad()
        loss = (model(inputs) - targets).square().mean()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


# ---- what cells do to the default group ------------------------------------------------------------------------------


def init_in_a_cell(me: Rank) -> Any:
    me.form()
    group = dist.group.WORLD
    from torch.distributed import init_process_group

    with contextlib.redirect_stdout(io.StringIO()) as notes:
        for call in (dist.init_process_group, init_process_group, dist.distributed_c10d.init_process_group):
            call("gloo")
        dist.init_process_group()
        dist.init_process_group(backend="cpu:gloo", init_method="env://", rank=me.rank, world_size=me.size)
    return {
        "notes": notes.getvalue(),
        "kept": dist.group.WORLD is group,
        "count": count(),
        "mesh": init_device_mesh("cpu", (me.size,)).get_group() is group,
        "nccl": raised(lambda: dist.init_process_group("nccl")),
        "smaller": raised(lambda: dist.init_process_group("gloo", rank=0, world_size=1)),
        "documented": dist.init_process_group.__doc__ == factory._torch_init.__doc__,
    }


def destroyed_and_made_again_in_a_cell(me: Rank) -> Any:
    me.form({"dp": 2, "tp": 2})
    counts = []
    for arguments in ((), ("gloo",), ("gloo", "env://")):
        dist.destroy_process_group()
        assert "Run dist.init_process_group() on all ranks" in raised(me.groups.require)
        dist.init_process_group(*arguments)
        counts.append(count())
    dist.destroy_process_group()
    if me.rank < 2:
        dist.init_process_group("gloo", world_size=2, rank=me.rank)
        counts.append(count())
        dist.destroy_process_group()
    dist.init_process_group("gloo", store=None, timeout=timedelta(seconds=20))
    counts.append(count())
    mesh = me.groups.device_mesh(["dp", "tp"], [2, 2])
    dist.barrier(mesh["tp"].get_group())
    return counts


def own_rendezvous(me: Rank) -> Any:
    """A script that brings its own store, or its own port, gets what it asks for."""
    me.form()
    dist.destroy_process_group()
    raised(lambda: dist.init_process_group("nonsense"), Exception)
    link = LinkStore(me.rpc)
    own = dist.PrefixStore("own", link)
    dist.init_process_group("gloo", store=own, rank=me.rank, world_size=me.size)
    first = count()
    assert any(key.startswith("own/") for key in link.list_keys())
    port = me.everyone(os.environ["MASTER_PORT"])[0]
    dist.destroy_process_group()
    os.environ["MASTER_ADDR"] = "localhost"
    dist.init_process_group("gloo", rank=me.rank, world_size=me.size)
    assert os.environ["MASTER_PORT"] == port
    second = count()
    dist.destroy_process_group()
    return first, second


def without_a_group(me: Rank) -> Any:
    me.groups.prepare(me.rpc, me.place(), epoch=0)
    before = dist.is_initialized(), raised(lambda: me.groups.device_mesh(["gpus"], [me.size]))
    dist.init_process_group("gloo")
    return *before, count(), me.groups.device_mesh(["gpus"], [me.size]).size()


def interrupted_init_in_a_cell(me: Rank) -> Any:
    """Two ranks run the cell, wait, are interrupted; then all run it."""
    me.form()
    dist.destroy_process_group()
    if me.rank in (0, 3):
        interrupt_main(0.3)
        assert raised(dist.init_process_group, KeyboardInterrupt) == ""
    else:
        time.sleep(0.5)
    dist.init_process_group()
    return count()


# ---- the store from torch's side -------------------------------------------------------------------------------------


def store_operations(me: Rank) -> Any:
    """All of torch's interface, through C++ (a PrefixStore) and directly."""
    link = LinkStore(me.rpc)
    got = []
    for store in (dist.PrefixStore(f"p{me.rank}", link), dist.PrefixStore("x", dist.PrefixStore(f"q{me.rank}", link))):
        store.set("k", "v")
        store.append("k", "w")
        store.multi_set(["a", "b"], ["1", "2"])
        short = timedelta(seconds=0.1)
        got.append(
            (
                store.get("k"),
                store.multi_get(["b", "a"]),
                (store.add("n", 5), store.add("n", -2), store.get("n")),
                (store.check(["a", "b"]), store.check(["a", "zzz"])),
                (store.compare_set("k", "vw", "new"), store.compare_set("k", "vw", "newer")),
                (store.delete_key("a"), store.delete_key("a"), store.check(["a"])),
                store.num_keys() > 2,
                store.has_extended_api(),
                store.wait(["k", "b"]),
                "wait timeout after 0.1 s" in raised(functools.partial(store.wait, ["no"], short), dist.DistStoreError),
            )
        )
    link.set_timeout(timedelta(seconds=0.1))
    late = raised(lambda: dist.PrefixStore("p", link).get("never"), dist.DistStoreError)
    copy = link.clone()
    link.close()
    return got[0] == got[1], got[0], late, copy is link, raised(lambda: link.get("k"), dist.DistStoreError)


def collected_store(me: Rank) -> Any:
    """torch keeps the C++ half only; nobody here keeps the Python half."""
    store = dist.PrefixStore("p", LinkStore(me.rpc))
    gc.collect()
    store.set(f"k{me.rank}", "v")
    return store.get(f"k{(me.rank + 1) % me.size}")


# ---- values ----------------------------------------------------------------------------------------------------------


class Config:
    """Pickled by reference: every rank has this class."""

    def __init__(self, depth: int) -> None:
        self.depth = depth


def values(me: Rank) -> Any:
    me.form()
    made: dict[str, Any] = {
        "floats": torch.arange(6.0).reshape(2, 3).t(),
        "scalar": torch.tensor(7),
        "bools": torch.tensor([True, False]),
        "halves": torch.ones(3, dtype=torch.bfloat16),
        "complex": torch.tensor([1 + 2j]).conj(),
        "nothing": torch.empty(0, 4),
        "weight": torch.nn.Parameter(torch.full((2,), 3.0)),
        "state": {"model": torch.nn.Linear(300, 300).state_dict(), "steps": [1, 2, {"lr": 0.1}]},
        "config": Config(4),
        "text": "hello",
    }
    source = 2
    namespace: dict[str, Any] = dict(made) if me.rank == source else {"text": "old"}
    for name in made:
        broadcast_value(name, namespace, source, me.groups)
    for name in ("floats", "scalar", "bools", "halves", "complex", "nothing", "weight"):
        got, reference = namespace[name], torch.utils._pytree.tree_map(lambda tensor: tensor, made[name])
        assert got.dtype == reference.dtype and type(got) is type(reference), name
        assert got.is_leaf and got.requires_grad == (name == "weight")
        torch.testing.assert_close(got.detach(), reference.detach())
    weights = me.everyone(namespace["state"]["model"]["weight"])
    assert all(torch.equal(weight, weights[0]) for weight in weights)
    namespace["state"]["model"]["weight"].add_(1)  # writable
    assert type(namespace["config"]) is Config
    if me.rank == source:
        exec("class OnlyHere:\n    size = 5\nnamespace['only'] = OnlyHere()", globals(), {"namespace": namespace})
        globals()["OnlyHere"] = type(namespace["only"])
    broadcast_value("only", namespace, source, me.groups)
    assert namespace["only"].size == 5
    namespace["double"] = (lambda x: 2 * x) if me.rank == source else None
    broadcast_value("double", namespace, source, me.groups)
    assert namespace["double"](4) == 8
    return namespace["text"], namespace["config"].depth, namespace["state"]["steps"]


def values_that_cannot_be_had(me: Rank) -> Any:
    me.form()
    namespace: dict[str, Any] = {"lock": threading.Lock(), "learning_rate": 0.1} if me.rank == 1 else {}
    errors = [
        raised(functools.partial(broadcast_value, name, namespace, 1, me.groups)) for name in ("learning_rte", "lock")
    ]
    errors.append(raised(lambda: broadcast_value("x", namespace, 9, me.groups)))
    broadcast_value("learning_rate", namespace, 1, me.groups)
    me.groups.close()
    errors.append(raised(lambda: broadcast_value("x", namespace, 1, me.groups)))
    return namespace["learning_rate"], errors


# ---- being forked ----------------------------------------------------------------------------------------------------


def run_rank(scenario: str, rank: int, size: int, options: dict[str, Any], sock: socket.socket) -> None:
    faulthandler.dump_traceback_later(RANK_DEADLINE_S, exit=True)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    torch.set_num_threads(1)
    me = Rank(rank, size, sock)
    try:
        ended = True, (globals().get(scenario) or getattr(guarded_scenarios, scenario))(me, **options)
    except BaseException:
        ended = False, traceback.format_exc()
    me.send(b"ended", pickle.dumps(ended))


def main(fd: int) -> None:
    warnings.filterwarnings("ignore", category=FutureWarning, module="torch")
    rank_groups.warm()
    with socket.socket(fileno=fd) as control:
        serve(control)


def serve(control: socket.socket) -> None:
    control.send(b"%d %d" % (thread_count(), sum("socket:" in link for link in _open_descriptors())))
    while request := control.recv(1 << 16):
        scenario, size, options = pickle.loads(request)
        _, descriptors, _, _ = socket.recv_fds(control, 1, size)
        for rank in range(size):
            if os.fork() == 0:
                control.close()
                for other in {*descriptors} - {descriptors[rank]}:
                    os.close(other)
                run_rank(scenario, rank, size, options, socket.socket(fileno=descriptors[rank]))
                os._exit(0)
        for descriptor in descriptors:
            os.close(descriptor)
        for _ in range(size):
            os.wait()
        control.send(b"reaped")


def _open_descriptors() -> list[str]:
    links = []
    for entry in os.listdir("/proc/self/fd"):
        try:
            links.append(os.readlink(f"/proc/self/fd/{entry}"))
        except FileNotFoundError:  # the listing's own
            pass
    return links


if __name__ == "__main__":
    sys.modules["group_ranks"] = sys.modules["__main__"]
    import guarded_scenarios

    main(int(sys.argv[1]))
