"""Programs for what stands beside the actors: jobs, memory that others read, settings. Run by `programs`."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable
from typing import Any

import meshbook.rdma
from meshbook.actor import Actor, endpoint, this_proc
from meshbook.config import (
    Encoding,
    clear_runtime_config,
    configure,
    configured,
    get_global_config,
    get_runtime_config,
    parametrize_config,
    parametrize_config_pointwise,
)
from meshbook.job import (
    DEFAULT_JOB_PATH,
    JobState,
    JobTrait,
    LocalJob,
    PortForwarder,
    ProcessJob,
    SlurmJob,
    exec_command,
    hosts_from_config,
    job_load,
    job_loads,
    load_current_job,
    set_current_job,
)
from meshbook.rdma import RDMAAction, RDMABuffer, get_rdma_backend, is_ibverbs_available

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


@program
def a_buffer_is_read(procs: Any) -> Any:
    owner, reader = memories(procs)
    buffer = owner.buffer.call_one().get()
    return reader.read.call_one(buffer, 16).get(), buffer.size()


@program
def a_buffer_is_written(procs: Any) -> Any:
    owner, reader = memories(procs)
    reader.write.call_one(owner.buffer.call_one().get(), b"as it is said up").get()
    return owner.look.call_one().get()


@program
def a_part_of_a_buffer_is_written(procs: Any) -> Any:
    owner, reader = memories(procs)
    reader.write.call_one(owner.buffer.call_one().get(), b"so").get()
    return owner.look.call_one().get()


@program
def a_buffer_is_read_into_too_little(procs: Any) -> Any:
    owner, reader = memories(procs)
    return reader.read.call_one(owner.buffer.call_one().get(), 8).get()


@program
def a_buffer_is_read_into_more(procs: Any) -> Any:
    owner, reader = memories(procs)
    return reader.read.call_one(owner.buffer.call_one().get(), 32).get()


@program
def too_much_is_written_into_a_buffer(procs: Any) -> Any:
    owner, reader = memories(procs)
    return reader.write.call_one(owner.buffer.call_one().get(), bytes(32)).get()


@program
def a_buffer_of_no_bytes(procs: Any) -> Any:
    return memories(procs)[0].empty.call_one().get()


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
def an_action_of_nothing(procs: Any) -> Any:
    return memories(procs)[1].nothing.call_one().get()


@program
def an_action_whose_copies_overlap(procs: Any) -> Any:
    owner, reader = memories(procs)
    return reader.overlap.call_one(owner.buffer.call_one().get()).get()


@program
def what_carries_buffers(procs: Any) -> Any:
    names = ("RDMAReadTransferWarning", "RDMAWriteTransferWarning", "RDMATcpFallbackWarning")
    return get_rdma_backend(), is_ibverbs_available(), [issubclass(getattr(meshbook.rdma, n), Warning) for n in names]


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
def hosts_that_a_job_has_not(procs: Any) -> Any:
    return LocalJob().state(cached_path=None).trainers


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
def a_file_that_is_not_there(procs: Any) -> Any:
    return job_load("/nowhere/job.pkl")


@program
def nodes_of_slurm_by_name(procs: Any) -> Any:
    job = SlurmJob({"trainers": 2}, gpus_per_node=2)
    job.add_mesh("judges", 1)
    return job.active, job.can_run(SlurmJob({"trainers": 2}))


@program
def the_job_of_a_folder(procs: Any) -> Any:
    before = os.getcwd()
    with tempfile.TemporaryDirectory() as folder:
        os.chdir(folder)
        try:
            set_current_job("service_programs.job_here")
            return load_current_job() is job_here
        finally:
            os.chdir(before)


job_here = LocalJob()


@program
def no_job_of_a_folder(procs: Any) -> Any:
    before = os.getcwd()
    with tempfile.TemporaryDirectory() as folder:
        os.chdir(folder)
        try:
            return load_current_job()
        finally:
            os.chdir(before)


@program
def hosts_of_no_job(procs: Any) -> Any:
    hosts = hosts_from_config("hosts_of_no_job")
    sizes = hosts.sizes
    hosts.shutdown().get()
    return sizes


@program
def a_command_on_hosts(procs: Any) -> Any:
    job = job_of_two()
    hosts = job.state(cached_path=None).hosts
    with tempfile.TemporaryDirectory() as folder:
        code = exec_command(hosts, ["sh", "-c", "echo $SAID $X; exit 3"], env={"X": "here"}, output_dir=folder).get()
        with open(os.path.join(folder, "stdout.txt")) as written:
            told = code, written.read()
        one = exec_command(hosts, ["true"], rank=1).get(), exec_command(hosts, ["false"], point={"hosts": 0}).get()
    job.kill()
    return told, one


@program
def a_forwarder_of_other_shapes(procs: Any) -> Any:
    forwarder: Any = this_proc().spawn("forwarder", PortForwarder)
    return forwarder.forward.call_one(procs, 80, this_proc(), "127.0.0.1:0").get()


@program
def every_setting(procs: Any) -> Any:
    ours = {"enable_log_forwarding", "host_spawn_ready_timeout", "mesh_proc_spawn_max_idle", "default_transport"}
    ours.add("message_latency_sampling_rate")  # a number of 32 bits there
    return {name: str(value)[:6] for name, value in sorted(get_global_config().items()) if name not in ours}


def setting(name: str, value: object) -> Callable[[Any], Any]:
    """A program that sets it, and says what it is then."""

    def run(procs: Any) -> Any:
        with configured(**{name: value}) as settings:
            return settings[name], name in get_runtime_config()

    run.__name__ = f"configured({name}={value!r})"
    return program(run)


for _value in ("30s", "90s", "1h30m", "1h 30m", "1500ms", "1.5s", "2d", "61m", "1w", "30", "soon", 30, 3.5, None):
    setting("cleanup_timeout", _value)
for _value in (7, True, 1.5, -1, "x"):
    setting("tail_log_lines", _value)
for _name, _value in (
    ("prefix_with_rank", False), ("prefix_with_rank", 1), ("message_latency_sampling_rate", 0.5),
    ("message_latency_sampling_rate", 1), ("message_latency_sampling_rate", "x"), ("mesh_admin_addr", "[::]:8080"),
    ("pyspy_bin", 3), ("rdma_max_nics_per_buffer", 3), ("rdma_max_nics_per_buffer", None),
    ("rdma_max_nics_per_buffer", "x"), ("default_encoding", "bincode"), ("default_transport", 42),
    ("default_transport", "invalid://scheme"), ("default_transport", "random_string"), ("does_not_exist", 1),
):  # fmt: skip
    setting(_name, _value)


@program
def an_encoding_that_is_set(procs: Any) -> Any:
    with configured(default_encoding=Encoding.Json) as settings:
        found = settings["default_encoding"]
        return found == Encoding.Json, str(Encoding.Multipart), found == Encoding.Bincode


@program
def settings_within_settings(procs: Any) -> Any:
    with configured(cleanup_timeout="7s"):
        with configured(tail_log_lines=3) as inner:
            told = inner["cleanup_timeout"], inner["tail_log_lines"]
        return told, get_global_config()["tail_log_lines"], get_global_config()["cleanup_timeout"]


@program
def settings_that_are_cleared(procs: Any) -> Any:
    configure(read_log_buffer=7)
    before = get_global_config()["read_log_buffer"]
    clear_runtime_config()
    return before, get_global_config()["read_log_buffer"]


@program
def tests_with_combinations_of_settings(procs: Any) -> Any:
    def test(extra: int) -> Any:
        return get_global_config()["tail_log_lines"], extra

    made = parametrize_config(tail_log_lines={5})(test)
    return made({"tail_log_lines": 5}, 1), made.__name__


@program
def tests_with_no_settings(procs: Any) -> Any:
    return parametrize_config()


@program
def tests_with_uneven_settings(procs: Any) -> Any:
    return parametrize_config_pointwise(tail_log_lines=[1], read_log_buffer=[1, 2])
