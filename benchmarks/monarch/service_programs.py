"""Programs for what stands beside the actors: jobs, memory that others read, settings. Run by `programs`."""

from __future__ import annotations

import contextlib
import os
import tempfile
from collections.abc import Callable, Iterator
from typing import Any

import meshbook.monarch.rdma
from meshbook.monarch import Actor, endpoint
from meshbook.monarch.config import (
    clear_runtime_config,
    configure,
    configured,
    get_global_config,
    get_runtime_config,
)
from meshbook.monarch.job import (
    DEFAULT_JOB_PATH,
    JobState,
    JobTrait,
    LocalJob,
    ProcessJob,
    SlurmJob,
    hosts_from_config,
    job_load,
    job_loads,
    load_current_job,
    set_current_job,
)
from meshbook.monarch.rdma import RDMAAction, RDMABuffer, get_rdma_backend, is_ibverbs_available

PROGRAMS: list[Callable[[Any], Any]] = []


def program(function: Callable[[Any], Any]) -> Callable[[Any], Any]:
    """Have it run with a mesh of four processes, gpus=4."""
    PROGRAMS.append(function)
    return function


class Where(Actor):
    @endpoint
    def look(self, name: str) -> tuple[int, str | None]:
        return os.getpid(), os.environ.get(name)


class Memory(Actor):
    """Has bytes that others read and write."""

    def __init__(self, size: int = 16) -> None:
        self.data = bytearray(range(size))

    @endpoint
    async def buffer(self) -> RDMABuffer:
        self.kept = RDMABuffer(memoryview(self.data))
        return self.kept

    @endpoint
    async def look(self) -> bytes:
        return bytes(self.data)

    @endpoint
    async def read(self, buffer: RDMABuffer, size: int) -> bytes:
        got = bytearray(size)
        await buffer.read_into(memoryview(got))
        return bytes(got)

    @endpoint
    async def write(self, buffer: RDMABuffer, data: bytes) -> None:
        await buffer.write_from(memoryview(bytearray(data)))

    @endpoint
    async def act(self, source: RDMABuffer, target: RDMABuffer) -> tuple[bytes, bytes]:
        got, more = bytearray(16), bytearray(b"new words are 16")
        action = RDMAAction().read_remote(memoryview(got), source).write_remote(target, memoryview(more))
        await action.submit(timeout=60)
        first = bytes(got)
        got[:] = bytes(16)
        await action.submit(timeout=60)
        return first, bytes(got)

    @endpoint
    async def nothing(self) -> None:
        await RDMAAction().submit(timeout=60)

    @endpoint
    async def overlap(self, buffer: RDMABuffer) -> None:
        got = bytearray(16)
        RDMAAction().read_remote(memoryview(got), buffer).read_remote(memoryview(got), buffer)

    @endpoint
    async def empty(self) -> None:
        RDMABuffer(memoryview(bytearray()))

    @endpoint
    async def drop(self, buffer: RDMABuffer) -> None:
        await buffer.drop()


def memories(procs: Any) -> tuple[Any, Any]:
    """Two actors, in different processes."""
    return procs.slice(gpus=0).spawn("owner", Memory), procs.slice(gpus=1).spawn("reader", Memory)


def read(procs: Any, size: int) -> bytes:
    """Return the content of a buffer, as another process reads it into so many bytes."""
    owner, reader = memories(procs)
    got: bytes = reader.read.call_one(owner.buffer.call_one().get(), size).get()
    return got


def written(procs: Any, data: bytes) -> bytes:
    """Return the content of a buffer once another process has written to it."""
    owner, reader = memories(procs)
    reader.write.call_one(owner.buffer.call_one().get(), data).get()
    content: bytes = owner.look.call_one().get()
    return content


for _name, _function in {
    "a_buffer_is_read": lambda procs: (read(procs, 16), memories(procs)[0].buffer.call_one().get().size()),
    "a_buffer_is_read_into_too_little": lambda procs: read(procs, 8),
    "a_buffer_is_read_into_more": lambda procs: read(procs, 32),
    "a_buffer_is_written": lambda procs: written(procs, b"as it is said up"),
    "a_part_of_a_buffer_is_written": lambda procs: written(procs, b"so"),
    "too_much_is_written_into_a_buffer": lambda procs: written(procs, bytes(32)),
    "a_buffer_of_no_bytes": lambda procs: memories(procs)[0].empty.call_one().get(),
    "an_action_of_nothing": lambda procs: memories(procs)[1].nothing.call_one().get(),
    "hosts_that_a_job_has_not": lambda procs: LocalJob().state(cached_path=None).trainers,
    "a_file_that_is_not_there": lambda procs: job_load("/nowhere/job.pkl"),
}.items():
    _function.__name__ = _name
    program(_function)


@program
def a_buffer_is_dropped(procs: Any) -> Any:
    owner, reader = memories(procs)
    return reader.drop.call_one(owner.buffer.call_one().get()).get()


@program
def an_action_of_a_read_and_a_write(procs: Any) -> Any:
    owner, reader = memories(procs)
    other = procs.slice(gpus=2).spawn("other", Memory)
    told = reader.act.call_one(owner.buffer.call_one().get(), other.buffer.call_one().get()).get()
    return told, other.look.call_one().get()


@program
def an_action_whose_copies_overlap(procs: Any) -> Any:
    owner, reader = memories(procs)
    return reader.overlap.call_one(owner.buffer.call_one().get()).get()


@program
def what_carries_buffers(procs: Any) -> Any:
    names = ("RDMAReadTransferWarning", "RDMAWriteTransferWarning", "RDMATcpFallbackWarning")
    return (
        get_rdma_backend(),
        is_ibverbs_available(),
        [issubclass(getattr(meshbook.monarch.rdma, n), Warning) for n in names],
    )


def job_of_two() -> Any:
    return ProcessJob({"hosts": 2}, env={"SAID": "by the job"})


@program
def hosts_of_a_job(procs: Any) -> Any:
    job = job_of_two()
    hosts = job.state(cached_path=None).hosts
    told = hosts.extent, hosts.sizes, hosts.slice(hosts=1).sizes
    spawned = hosts.spawn_procs({"gpus": 2})
    found = [said for _, said in spawned.spawn("where", Where).look.call("SAID").get().values()]
    sizes = spawned.sizes
    job.kill()
    return told, sizes, found


@program
def a_part_of_the_hosts_of_a_job(procs: Any) -> Any:
    job = job_of_two()
    part = job.state(cached_path=None).hosts.slice(hosts=1)
    found = part.spawn_procs({"gpus": 2}).spawn("where", Where).look.call("SAID").get()
    told = found.sizes, [said for _, said in found.values()]
    job.kill()
    return told


@program
def what_a_job_can_run(procs: Any) -> Any:
    job = job_of_two()
    before = job.can_run(job_of_two()), job.active, job.apply_id
    job.apply()
    named = job.apply_id
    job.apply()
    while_it_runs = job.can_run(job_of_two()), job.can_run(ProcessJob({"hosts": 3})), job.active, job.apply_id == named
    job.kill()
    return before, while_it_runs, job.active, job.apply_id


class Allocation(JobTrait):
    """A job of a program's own."""

    def __init__(self, name: str, runs: bool = True) -> None:
        super().__init__()
        self.name, self.runs, self.created = name, runs, 0

    def _create(self, client_script: str | None) -> None:
        self.created += 1

    def _state(self) -> JobState:
        return JobState({self.name: NamedHosts(self.name)})  # type: ignore[dict-item]

    def can_run(self, spec: JobTrait) -> bool:
        return self.runs

    def _kill(self) -> None:
        self.created = -1


class NamedHosts:
    """Stands in for hosts in jobs that start none."""

    def __init__(self, name: str) -> None:
        self.name = name

    def with_python_executable(self, python: str) -> NamedHosts:
        return self


@program
def a_job_in_a_file_is_taken(procs: Any) -> Any:
    with tempfile.TemporaryDirectory() as folder:
        path = os.path.join(folder, "more", "job.pkl")
        first, second = Allocation("a"), Allocation("b")
        first.state(cached_path=path)
        state: Any = second.state(cached_path=path)
        loaded = job_load(path)
        told = state.a.name, second.created, first.apply_id == loaded.apply_id == second.apply_id
        also: Any = loaded.state(cached_path=None)
        return told, also.a.name


@program
def a_job_in_a_file_that_cannot_run_what_is_asked_for(procs: Any) -> Any:
    with tempfile.TemporaryDirectory() as folder:
        path = os.path.join(folder, "job.pkl")
        Allocation("a", runs=False).state(cached_path=path)
        second = Allocation("b")
        state: Any = second.state(cached_path=path)
        return state.b.name, second.created, job_load(path).can_run(second)


@program
def a_job_as_bytes(procs: Any) -> Any:
    job = Allocation("a")
    before = job_loads(job.dumps()).active
    job.apply()
    again = job_loads(job.dumps())
    return before, again.active, again.apply_id == job.apply_id


@program
def a_job_that_is_ended(procs: Any) -> Any:
    job = Allocation("a")
    job.apply()
    job.kill()
    job.kill()
    return job.created, job.active


@program
def a_job_without_telemetry(procs: Any) -> Any:
    state: Any = LocalJob().state(cached_path=None)
    return state.query_engine, state.telemetry_url, state.admin_url, DEFAULT_JOB_PATH


@program
def nodes_of_slurm_by_name(procs: Any) -> Any:
    job = SlurmJob({"trainers": 2}, gpus_per_node=2)
    job.add_mesh("judges", 1)
    return job.active, job.can_run(SlurmJob({"trainers": 2}))


@contextlib.contextmanager
def in_folder() -> Iterator[None]:
    """Work in a folder of its own."""
    before = os.getcwd()
    with tempfile.TemporaryDirectory() as folder:
        os.chdir(folder)
        try:
            yield
        finally:
            os.chdir(before)


@program
def the_job_of_a_folder(procs: Any) -> Any:
    with in_folder():
        set_current_job("service_programs.job_here")
        return load_current_job() is job_here


job_here = LocalJob()


@program
def no_job_of_a_folder(procs: Any) -> Any:
    with in_folder():
        return load_current_job()


@program
def hosts_of_no_job(procs: Any) -> Any:
    hosts = hosts_from_config("hosts_of_no_job")
    sizes = hosts.sizes
    hosts.shutdown().get()
    return sizes


def setting(name: str, value: object) -> Callable[[Any], Any]:
    """A program that sets it, and says what it is then."""

    def run(procs: Any) -> Any:
        with configured(**{name: value}) as settings:
            return settings[name], name in get_runtime_config()

    run.__name__ = f"configured({name}={value!r})"
    return program(run)


for _value in ("30s", "1h 30m", "30", "soon", 30, 3.5, None):
    setting("host_spawn_ready_timeout", _value)
for _name, _value in (
    ("enable_log_forwarding", False), ("enable_log_forwarding", 1), ("codec_max_frame_length", 7),
    ("codec_max_frame_length", "x"), ("does_not_exist", 1),
):  # fmt: skip
    setting(_name, _value)


@program
def settings_within_settings(procs: Any) -> Any:
    with configured(host_spawn_ready_timeout="7s"):
        with configured(codec_max_frame_length=3) as inner:
            told = inner["host_spawn_ready_timeout"], inner["codec_max_frame_length"]
        return told, get_global_config()["codec_max_frame_length"], get_global_config()["host_spawn_ready_timeout"]


@program
def settings_that_are_cleared(procs: Any) -> Any:
    configure(codec_max_frame_length=7)
    before = get_global_config()["codec_max_frame_length"]
    clear_runtime_config()
    return before, get_global_config()["codec_max_frame_length"]
