"""Small programs for Monarch's documented interface. A copy with Monarch's imports runs there.

Run as a module of its own: prints one JSON object, the name of each program to its answer.
"""

from __future__ import annotations

import asyncio
import builtins
import importlib
import json
import logging
import os
import pickle
import sys
import time
from collections.abc import Callable
from typing import Any

import meshbook.monarch
from meshbook import NDSlice, Shape
from meshbook.monarch import (
    Accumulator,
    Actor,
    ActorError,
    Channel,
    Extent,
    Point,
    ValueMesh,
    as_endpoint,
    concurrent_endpoint,
    context,
    current_rank,
    current_size,
    default_bootstrap_cmd,
    endpoint,
    get_or_spawn_controller,
    send,
    this_host,
    this_proc,
)
from meshbook.monarch.config import configure, configured, get_global_config, get_runtime_config
from meshbook.monarch.job import ProcessJob
from meshbook.monarch.spmd import setup_torch_elastic_env

PROGRAMS: list[Callable[[Any], Any]] = []
BESIDE = ("whole_programs", "service_programs", "tensor_programs", "engine_programs")
"""Modules with more of them; `shape_programs` has expressions."""


def program(function: Callable[[Any], Any]) -> Callable[[Any], Any]:
    """Have it run with a mesh of four processes, gpus=4."""
    PROGRAMS.append(function)
    return function


class Counter(Actor):
    def __init__(self, value: int = 0) -> None:
        self.value, self.said = value, list[str]()

    @endpoint
    def add(self, by: int) -> int:
        self.value += by
        return self.value

    @endpoint
    def rank(self) -> int:
        return current_rank().rank

    @endpoint
    def where(self) -> tuple[dict[str, int], dict[str, int]]:
        return dict(current_rank()), current_size()

    @endpoint
    def fail(self) -> None:
        raise ValueError("broken")

    @endpoint
    def who(self) -> tuple[str, str, bool]:
        me = context().actor_instance
        return me.name, str(me.creator), len(me.proc) == 1

    @endpoint
    def warm(self) -> None:
        importlib.import_module("torch")  # now: Monarch gives up on tensors whose processes take 30 s to import it

    @endpoint
    def is_on(self, host: Any) -> bool:
        return bool(this_host() == host)

    @endpoint
    def log(self, name: str) -> str:
        """What a handler is given of a record that this actor makes."""
        if not self.said:  # for good: Monarch knows handlers that are there when a message comes
            handler = logging.Handler()
            handler.emit = lambda record: self.said.append(record.getMessage())  # type: ignore[method-assign]
            logging.getLogger().addHandler(handler)
        logging.getLogger("of.a.program").warning("it is %s", name)
        return self.said[-1]

    @endpoint
    def pid(self) -> int:
        return os.getpid()

    @endpoint
    def variables(self) -> list[str]:
        return [os.environ[name] for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "GROUP_RANK")]

    @endpoint
    def look_up(self, names: list[str]) -> list[str | None]:
        return [os.environ.get(name) for name in names]

    @endpoint
    def executable(self) -> str:
        return sys.executable

    @endpoint
    def cpus(self) -> list[int]:
        return sorted(os.sched_getaffinity(0))

    @endpoint(explicit_response_port=True)
    def later(self, port: Any, value: int) -> None:
        port.send(value + current_rank().rank)

    @endpoint
    def hold(self, port: Any) -> None:
        port.send(("from", current_rank().rank))

    @endpoint
    def call_other(self, other: Any, by: int) -> list[int]:
        values = other.add.call(by).get()
        return [value for _, value in values.items()]

    def plain(self) -> str:
        return "plain"

    @endpoint
    def stop_itself(self) -> str:
        context().actor_instance.stop("enough")
        return "stopping"


class Queue(Actor):
    def __init__(self) -> None:
        self.queue: asyncio.Queue[int] = asyncio.Queue()

    @concurrent_endpoint
    async def take(self) -> int:
        return await self.queue.get()

    @concurrent_endpoint
    async def put(self, value: int) -> None:
        await self.queue.put(value)


class Broken(Actor):
    def __init__(self) -> None:
        raise ValueError("cannot be")

    @endpoint
    def ping(self) -> str:
        return "pong"


def values(mesh: Any) -> list[Any]:
    return [value for _, value in mesh.items()]


def told_by(there: Any, ask: Callable[[Any], Any]) -> list[Any]:
    """Return the answers of counters in processes that are stopped then."""
    told = values(ask(there.spawn("c", Counter)))
    there.stop().get()
    return told


for _name, _function in {
    "call": lambda procs: values(procs.spawn("c", Counter, 3).add.call(2).get()),
    "call_one_of_a_slice": lambda procs: (procs.spawn("c", Counter).slice(gpus=2).rank.call_one().get(), "done"),
    "call_one_of_several": lambda procs: procs.spawn("c", Counter).add.call_one(1).get(),
    "choose": lambda procs: procs.spawn("c", Counter, 5).add.choose(1).get(),
    "stream": lambda procs: sorted(future.get() for future in procs.spawn("c", Counter).rank.stream()),
    "an_endpoint_that_raises": lambda procs: procs.spawn("c", Counter).fail.call().get(),
    "too_many_arguments": lambda procs: procs.spawn("c", Counter).add.call(1, 2).get(),
    "a_keyword_that_is_none": lambda procs: procs.spawn("c", Counter).add.call(to=2).get(),
    "no_endpoint_of_this_name": lambda procs: procs.spawn("c", Counter).nothing.call().get(),
    "a_method_that_is_no_endpoint": lambda procs: values(as_endpoint(procs.spawn("c", Counter).plain).call().get()),
    "an_explicit_response_port": lambda procs: values(procs.spawn("c", Counter).later.call(10).get()),
    "no_axis_of_this_name": lambda procs: procs.slice(nothing=1),
    "a_level_of_logging": lambda procs: asyncio.run(_await(procs.logging_option(stream_to_client=True, level=30))),
    "no_level_of_logging": lambda procs: asyncio.run(_await(procs.logging_option(stream_to_client=True, level=256))),
    "no_setting_of_this_name": lambda procs: configure(host_spawn_ready_timeouts="7s"),
    "too_few_bindings": lambda procs: this_host().spawn_procs({"gpus": 2}, proc_bind=[{"cpus": "0"}]),
    "awaited": lambda procs: values(asyncio.run(_await(procs.spawn("c", Counter).rank.call()))),
    "gathered": lambda procs: sorted(asyncio.run(_gather(procs.spawn("c", Counter).rank.stream()))),
    "the_host_of_a_rank": lambda procs: values(procs.spawn("c", Counter).is_on.call(this_host()).get()),
    "concurrent_endpoints_have_options": lambda procs: values(procs.spawn("beside", Beside).beside.call(7).get()),
    "bootstrap_comes_second": lambda procs: told_by(this_host().spawn_procs({"gpus": 1}, set_variable), first_variable),
    "bootstrap_may_be_async": lambda procs: told_by(this_host().spawn_procs({"gpus": 1}, set_later), first_variable),
    "a_bootstrap_command_for_each": lambda procs: told_by(
        this_host().spawn_procs({"gpus": 2}, bootstrap_command=command_of),
        lambda counters: counters.look_up.call(["SAID"]).get(),
    ),
}.items():
    _function.__name__ = _name
    program(_function)


@program
def broadcast_then_call(procs: Any) -> Any:
    counters = procs.spawn("c", Counter)
    counters.add.broadcast(4)
    return values(counters.add.call(1).get())


@program
def where_a_slice_is(procs: Any) -> Any:
    counters = procs.spawn("c", Counter)
    return values(counters.slice(gpus=slice(1, 3)).where.call().get()), counters.slice(gpus=1).where.call_one().get()


@program
def where_a_split_is(procs: Any) -> Any:
    split = procs.split(gpus=("a", "b"), a=2)
    return split.sizes, values(split.spawn("c", Counter).where.call().get())


@program
def items_of_a_result(procs: Any) -> Any:
    result = procs.spawn("c", Counter).rank.call().get()
    return [(dict(point), value) for point, value in result.items()], result.item(gpus=3)


@program
def what_an_endpoint_has_raised(procs: Any) -> Any:
    try:
        procs.spawn("c", Counter).slice(gpus=0).fail.call_one().get()
    except ActorError as error:
        return type(error.exception).__name__, str(error.exception)


@program
def state_survives_an_error(procs: Any) -> Any:
    counter = procs.slice(gpus=0).spawn("c", Counter, 7)
    try:
        counter.fail.call_one().get()
    except ActorError:
        return counter.add.call_one(1).get()


@program
def calls_to_what_was_stopped(procs: Any) -> Any:
    counters = procs.spawn("c", Counter)
    counters.add.call(1).get()
    counters.stop().get()
    return counters.add.call(1).get()


@program
def an_actor_stops_itself(procs: Any) -> Any:
    counter = procs.slice(gpus=0).spawn("c", Counter)
    told = counter.stop_itself.call_one().get()
    try:
        counter.add.call_one(1).get()
    except RuntimeError as error:
        time.sleep(5)  # within which Monarch interrupts the program
        return told, "enough" in str(error)


@program
def initialized(procs: Any) -> Any:
    return procs.initialized.get(), this_host().initialized.get(), procs.spawn("c", Counter).initialized.get()


@program
def actors_of_the_program(procs: Any) -> Any:
    counter = this_proc().spawn("here", Counter, 3)
    here = counter.pid.call_one().get() == os.getpid()
    return here, counter.add.call_one(1).get(), len(this_proc()), this_proc().sizes


@program
def actors_of_the_program_and_ranks(procs: Any) -> Any:
    here, there = this_proc().spawn("here", Counter), procs.spawn("there", Counter, 1)
    return here.call_other.call_one(there, 2).get(), sorted(values(there.call_other.call(here, 1).get()))


@program
def who_an_actor_is(procs: Any) -> Any:
    return procs.slice(gpus=0).spawn("me", Counter).who.call_one().get(), str(context().actor_instance)


@program
def a_port_that_is_sent(procs: Any) -> Any:
    port, receiver = Channel[Any].open()
    procs.spawn("c", Counter).hold.broadcast(port)
    return sorted(receiver.recv().get() for _ in range(4))


@program
def answers_on_a_port(procs: Any) -> Any:
    port, receiver = Channel[Any].open()
    send(procs.spawn("c", Counter, 1).add, (2,), {}, port)
    return [receiver.recv().get() for _ in range(4)]


@program
def an_exception_on_a_port(procs: Any) -> Any:
    port, receiver = Channel[Any].open()
    port.exception(ValueError("sent"))
    return receiver.recv().get()


@program
def an_accumulator(procs: Any) -> Any:
    return Accumulator(procs.spawn("c", Counter, 2).rank, 100, lambda total, rank: total + rank).accumulate().get()


@program
def concurrent_endpoints(procs: Any) -> Any:
    queue = procs.slice(gpus=0).spawn("q", Queue)
    taken = queue.take.call_one()
    queue.put.call_one(5).get()
    return taken.get()


@program
def a_controller_of_its_own(procs: Any) -> Any:
    first = get_or_spawn_controller("only", Counter, 1).get()
    second = get_or_spawn_controller("only", Counter, 100).get()
    return first.add.call_one(1).get(), second.add.call_one(1).get()


@program
def torchruns_variables(procs: Any) -> Any:
    setup_torch_elastic_env(procs)
    return values(procs.spawn("c", Counter).variables.call().get())


@program
def shapes_of_a_mesh(procs: Any) -> Any:
    return procs.sizes, procs.size(), len(procs), procs.extent.labels, procs.rename(gpus="g").sizes, procs.size("gpus")


@program
def meshes_are_pickled(procs: Any) -> Any:
    again = pickle.loads(pickle.dumps(procs.spawn("c", Counter, 4)))
    return values(again.add.call(1).get())


@program
def a_bootstrap_command(procs: Any) -> Any:
    command = default_bootstrap_cmd().with_env({"SAID": "once"}).with_env({"HIDDEN": None})
    there = this_host().spawn_procs({"gpus": 2}, bootstrap_command=command)
    told = told_by(there, lambda counters: counters.look_up.call(["SAID", "HIDDEN", "SEEN"]).get())
    return told, command.env["SAID"], command.inherit_env


def command_of(point: Any) -> Any:
    return default_bootstrap_cmd().with_env({"SAID": str(point["gpus"])})


@program
def another_python(procs: Any) -> Any:
    there = this_host().with_python_executable(sys.executable).spawn_procs({"gpus": 1})
    return told_by(there, lambda counters: counters.executable.call().get()) == [sys.executable]


@program
def processes_that_are_bound(procs: Any) -> Any:
    cpu = min(os.sched_getaffinity(0))
    there = this_host().spawn_procs({"gpus": 2}, proc_bind=[{"cpus": str(cpu)}, {"cpus": str(cpu)}])
    return told_by(there, lambda counters: counters.cpus.call().get()) == [[cpu], [cpu]]


@program
def settings_for_a_while(procs: Any) -> Any:
    before = get_global_config()["host_spawn_ready_timeout"]
    with configured(host_spawn_ready_timeout="7s", enable_log_forwarding=True) as settings:
        told = settings["host_spawn_ready_timeout"], get_runtime_config()["enable_log_forwarding"]
    return told, get_global_config()["host_spawn_ready_timeout"] == before


async def set_later() -> None:
    await asyncio.sleep(0)
    set_variable()


def first_variable(counters: Any) -> Any:
    return counters.variables.call().get()


def set_variable() -> None:
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "GROUP_RANK"):
        os.environ[name] = "booted"


async def _await(future: Any) -> Any:
    return await future


async def _gather(futures: Any) -> list[Any]:
    return list(await asyncio.gather(*(future.as_asyncio() for future in futures)))


class Placed(Actor):
    """Says where it is, and starts others."""

    @endpoint
    def ping(self) -> str:
        return "pong"

    @endpoint
    def start(self, hosts: Any) -> list[str]:
        started = hosts.spawn_procs({"gpus": 2})
        said = values(started.spawn("started", Placed).ping.call().get())
        started.stop().get()
        return said

    @endpoint
    def its_procs(self) -> Any:
        me = context().actor_instance
        return me.proc_mesh.sizes, len(me.proc), me.rank.rank, me.class_name.rpartition(".")[2]

    @endpoint
    def its_host(self) -> int:
        return len(this_host())


class Late(Actor):
    """The last rank answers first."""

    @endpoint
    def answer(self) -> int:
        rank = current_rank().rank
        time.sleep(0.6 * (3 - rank))
        return rank


class Beside(Actor):
    @concurrent_endpoint(propagate=None)
    async def beside(self, value: int) -> int:
        return value


def kind_of(work: Callable[[], Any]) -> str:
    """What it gives, or whether it fails as calls do to what is not there."""
    try:
        return repr(work())
    except (RuntimeError, ActorError):
        return "fails"


def begin_late() -> None:
    time.sleep(2)


def begin_badly() -> None:
    raise ValueError("cannot begin")


@program
def processes_come_up_aside(procs: Any) -> Any:
    began = time.monotonic()
    late = this_host().spawn_procs({"gpus": 2}, bootstrap=begin_late)
    calls = [late.spawn("c", Counter).add.call(by) for by in (1, 2)]
    is_soon = time.monotonic() - began < 1.5
    told = [values(call.get()) for call in calls], late.initialized.get()
    late.stop().get()
    return is_soon, told


@program
def what_an_actor_knows_of_its_place(procs: Any) -> Any:
    actors = procs.spawn("a", Placed)
    return values(actors.its_procs.call().get()), values(actors.its_host.call().get())


@program
def hosts_that_are_shut_down(procs: Any) -> Any:
    hosts = ProcessJob({"hosts": 1}).state(cached_path=None).hosts
    there = hosts.spawn_procs({"gpus": 1})
    told = hosts.extent.labels, hosts.is_fake_in_process, there.initialized.get()
    gone = hosts.shutdown().get()
    return told, gone, kind_of(hosts.spawn_procs)


@program
def processes_without_a_count(procs: Any) -> Any:
    alone = this_host().spawn_procs()
    hosts = ProcessJob({"hosts": 2}).state(cached_path=None).hosts
    there = hosts.spawn_procs()
    ranks = there.spawn("c", Counter).rank.call().get()
    told = alone.sizes, there.sizes, ranks.item(hosts=1), alone.spawn("c", Counter).add.call_one(2).get()
    hosts.shutdown().get()
    return told


@program
def a_part_of_the_hosts_is_no_owner(procs: Any) -> Any:
    hosts = ProcessJob({"hosts": 2}).state(cached_path=None).hosts
    refused = kind_of(lambda: hosts.slice(hosts=1).shutdown().get())
    still = hosts.spawn_procs().sizes
    hosts.shutdown().get()
    return refused, still


@program
def log_records_of_actors(procs: Any) -> Any:
    logger = procs.slice(gpus=2).spawn("logger", Counter)
    logger.log.call_one("warm").get()
    return logger.log.call_one("me").get().partition("Counter ")[2]


@program
def hosts_that_are_stopped_are_there(procs: Any) -> Any:
    job = ProcessJob({"hosts": 2})
    hosts = job.state(cached_path=None).hosts
    before = values(hosts.spawn_procs({"gpus": 1}).spawn("c", Counter).pid.call().get())
    hosts.stop().get()
    again = job.state(cached_path=None).hosts
    after = values(again.spawn_procs({"gpus": 1}).spawn("c", Counter).pid.call().get())
    again.shutdown().get()
    return len({*before, *after})


@program
def hosts_for_a_block(procs: Any) -> Any:
    async def use() -> Any:
        async with ProcessJob({"hosts": 2}).state(cached_path=None).hosts as hosts:
            ranks = await hosts.spawn_procs({"gpus": 1}).spawn("c", Counter).rank.call()
        return values(ranks), kind_of(hosts.spawn_procs)

    return asyncio.run(use())


@program
def processes_for_a_block(procs: Any) -> Any:
    async def use() -> Any:
        async with this_host().spawn_procs({"gpus": 2}) as there:
            ranks = await there.spawn("c", Counter).rank.call()
            is_there = await there.initialized
        return values(ranks), is_there, kind_of(lambda: there.spawn("d", Counter).rank.call().get())

    return asyncio.run(use())


@program
def hosts_that_are_sent(procs: Any) -> Any:
    hosts = ProcessJob({"hosts": 2}).state(cached_path=None).hosts
    hosts.initialized.get()
    said = procs.slice(gpus=0).spawn("a", Placed).start.call_one(hosts).get()
    refused = kind_of(lambda: pickle.loads(pickle.dumps(hosts)).shutdown().get())
    hosts.shutdown().get()
    return said, refused


@program
def folded_as_they_come(procs: Any) -> Any:
    order: Any = Accumulator(procs.spawn("late", Late).answer, [], lambda seen, rank: [*seen, rank])
    return order.accumulate().get()


@program
def what_nobody_receives(procs: Any) -> Any:
    port, receiver = Channel[int].open(once=True)
    port.return_undeliverable = False
    port.send(1)
    return receiver.recv().get(), port.return_undeliverable


@program
def stops_and_then(procs: Any) -> Any:
    """The last one with this mesh: it stops it."""
    counters = procs.spawn("c", Counter)
    counters.add.call(1).get()
    procs.stop().get()
    return counters.add.call(1).get()


@program
def processes_that_do_not_come(procs: Any) -> Any:
    # Monarch's own would interrupt the programs that follow.
    meshbook.monarch.unhandled_fault_hook = lambda failure: None
    never = this_host().spawn_procs({"gpus": 2}, bootstrap=begin_badly)
    counters = never.spawn("c", Counter)
    kinds = [kind_of(counters.add.call(1).get), kind_of(never.initialized.get)]
    return [*kinds, kind_of(lambda: never.spawn("d", Counter))]


extent, rows = Extent(["h", "g"], [2, 3]), NDSlice.new_row_major([2, 3])
sparse = NDSlice(offset=1, sizes=[2, 2], strides=[4, 2])
shape, part = Shape(["h", "g"], rows), Shape(["a", "b"], sparse)
point, letters = Point(4, extent), ValueMesh(shape, list("abcdef"))
empty = Extent([], [])

EXPRESSIONS = """
extent | str(extent) | extent.labels | extent.sizes | extent["g"] | extent["z"] | len(extent) | list(extent) | list(extent.keys())
"g" in extent | "z" in extent | extent.nelements | extent == Extent(["h", "g"], [2, 3]) | extent == Extent(["g", "h"], [3, 2])
extent != Extent(["h"], [2]) | dict(extent) | {**extent} | empty | empty.nelements | Extent(["a"], [1, 2]) | Extent(("a",), (2,))
pickle.loads(pickle.dumps(extent)) == extent | extent.region.labels | extent.region.slice() | extent.region.as_shape()
extent.region.point_of_base_rank(4) | extent.region.point_of_base_rank(6) | extent.region == extent.region
point | str(point) | point.rank | point.extent | point["h"], point["g"] | point["z"] | len(point) | list(point) | dict(point)
point.size("g") | point.size("z") | point == Point(4, extent) | point == Point(3, extent) | Point(6, extent) | Point(0, empty)
list(point.items()) | "h" in point | point < Point(5, extent) | pickle.loads(pickle.dumps(point)) == point | list(point.keys())
rows | str(rows) | rows.offset, rows.sizes, rows.strides, rows.ndim | len(rows) | list(rows) | list(sparse) | sparse | rows[4] | sparse[3]
rows == NDSlice.new_row_major([2, 3]) | rows == [0, 1, 2, 3, 4, 5] | rows[6] | rows[1:3] | sparse.index(5) | sparse.index(4)
sparse.coordinates(7) | sparse.coordinates(4) | sparse.nditem([1, 1]) | 5 in sparse | 4 in sparse | hash(rows) == hash(NDSlice.new_row_major([2, 3]))
NDSlice(offset=0, sizes=[2], strides=[1, 2]) | NDSlice(offset=0, sizes=[], strides=[]) | list(NDSlice(offset=3, sizes=[], strides=[]))
NDSlice(offset=0, sizes=[2, 2], strides=[1, 1]) | NDSlice.from_list([0, 1, 2, 4, 6]) | NDSlice.from_list([]) | NDSlice.new_row_major([])
pickle.loads(pickle.dumps(sparse)) == sparse | shape | str(shape) | part | shape.labels | shape.ndslice | shape.extent | shape.ranks()
shape.coordinates(4) | shape.coordinates(9) | shape.at("h", 1) | shape.at("h", 2) | shape.at("z", 0) | shape.index(h=1) | shape.index(h=1, g=2)
shape.index(z=1) | shape.select("g", slice(0, 2)) | shape.select("g", slice(5, 6)) | shape.select("z", slice(0, 2)) | len(shape)
shape == Shape(["h", "g"], NDSlice.new_row_major([2, 3])) | shape == part | Shape(["h"], rows) | Shape.unity() | Shape.unity().ranks()
pickle.loads(pickle.dumps(shape)) == shape | letters.extent | letters.sizes | letters.size() | letters.size("g") | letters.size(["h", "g"])
letters.size("z") | len(letters) | letters.values() | list(letters.items()) | list(letters) | letters.item(h=1, g=1) | letters.item(h=5, g=1)
letters.get(4) | letters.get(6) | letters.slice(h=1).values() | letters.slice(h=1).item(g=2) | letters.slice(z=1) | letters.slice(h=7)
letters.split(g=("a", "b"), a=3).values() | letters.split(g=("a", "b"), a=2) | letters.flatten("x").item(x=3) | letters.rename(h="n").sizes
letters.rename(z="n") | ValueMesh(shape, list("abc")) | ValueMesh(part, list("abcd")).item(a=1, b=0) | ValueMesh(Shape.unity(), [7]).item()
ValueMesh.from_indexed(shape, [(i, i * i) for i in range(6)]).values() | ValueMesh.from_indexed(shape, [(0, 1)])
ValueMesh.from_indexed(shape, [(i, i) for i in range(7)]) | pickle.loads(pickle.dumps(letters)).values()
extent.keys() | Extent(["a"], [0]).nelements | Extent(["a b"], [1]) | point == {"h": 1, "g": 1} | Point(-1, extent) | point.keys() | rows[-1]
letters.item(h=1) | letters.item(h=1, z=1) | letters.get(-1) | letters.slice(h=1).get(0) | letters.slice(g=slice(0, 3, 2)).values()
letters.slice(g=1).flatten("x").values() | letters == ValueMesh(shape, list("abcdef")) | str(letters) | sparse.nditem([2, 1]) | sparse.nditem([1])
shape.select("g", slice(0, 3, 2)) | ValueMesh(part, list("abcd")).get(3) | Point(7, extent).rank | point.get("z")
Shape(["h"], NDSlice(offset=0, sizes=[1], strides=[3])).ndslice | letters.items() == list(letters.items()) | rows.index(4, 0)
"""  # noqa: E501


def answer_of(work: Callable[[], Any]) -> str:
    """The repr of what it gives; of what it raises the classes that both sides know."""
    try:
        return repr(work())
    except BaseException as error:
        names = [kind.__name__ for kind in type(error).__mro__]
        common = ("ActorError", "SupervisionError", *vars(builtins))
        return f"raises {' '.join(name for name in names if name in common)}"


def main() -> None:
    random_ones = importlib.import_module("shape_programs").expressions()
    expressions = [each.strip() for line in EXPRESSIONS.strip().splitlines() for each in line.split(" | ")]
    shapes = {each: answer_of(lambda each=each: eval(each)) for each in random_ones}  # type: ignore[misc]
    answers = {each: answer_of(lambda each=each: eval(each)) for each in expressions}  # type: ignore[misc]
    os.environ.update({"SEEN": "1", "HIDDEN": "1"})
    procs = this_host().spawn_procs({"gpus": 4})
    procs.spawn("warm", Counter).warm.call().get()
    beside = [each for name in BESIDE for each in importlib.import_module(name).PROGRAMS]
    for each in [*beside, *PROGRAMS]:
        sys.stderr.write(f"{each.__name__}\n")  # which one hangs, where one does
        answers[each.__name__] = answer_of(lambda each=each: each(procs))  # type: ignore[misc]
    answers["Broken"] = answer_of(lambda: this_host().spawn_procs({"gpus": 1}).spawn("b", Broken).ping.call_one().get())
    sys.stdout.write(f"\nANSWERS {json.dumps({'programs': answers, 'shapes': shapes})}\n")
    sys.stdout.flush()


if __name__ == "__main__":
    importlib.import_module("programs").main()  # by the name under which processes of the mesh find its classes
