"""What runs out: disk, descriptors, memory, processes. A clear error where it happens; what runs already runs on."""

from __future__ import annotations

import os
import resource
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import psutil
import pytest
import torch
from collector import Collector
from patience import wait_until
from template_processes import torch_templates_of

from meshbook import LocalLauncher, ProcMesh, errors, shutdown, start_hosts, this_host
from meshbook.mesh.rank_calls import start_cell

pytestmark = pytest.mark.usefixtures("no_lasting_template")

MEGABYTE = 1 << 20


@contextmanager
def limited(pid: int, kind: int, soft: int) -> Iterator[None]:
    """The process has less of something for a while."""
    before = resource.prlimit(pid, kind)  # type: ignore[attr-defined]
    resource.prlimit(pid, kind, (soft, before[1]))  # type: ignore[attr-defined]
    try:
        yield
    finally:
        resource.prlimit(pid, kind, before)  # type: ignore[attr-defined]


def _first_free(pid: int) -> int:
    """The next descriptor that the process would get; with this limit it gets none."""
    if pid == os.getpid():
        os.close(free := os.dup(0))
        return free
    used = set(map(int, os.listdir(f"/proc/{pid}/fd")))
    return next(fd for fd in range(len(used) + 1) if fd not in used)


def _agent_of(mesh: ProcMesh) -> int:
    hello = mesh._mesh.hosts[0].hello
    assert hello is not None
    return hello.pid


def _template_of(mesh: ProcMesh) -> int:
    (template,) = torch_templates_of(_agent_of(mesh), [status.pid for status in mesh.status()])
    return int(template.pid)


# ---- disk ----------------------------------------------------------------------------------------------------------

CHATTER = "for i in range(3000): print(i, 'x' * 60)"


def _check_chatter(mesh: ProcMesh, why: str) -> None:
    got = Collector()
    start_cell(mesh, CHATTER, on_output=got).future.get(30)
    for rank in range(len(mesh)):
        assert got.text(rank) == "".join(f"{i} {'x' * 60}\n" for i in range(3000))
    said = [got.text(rank, "stderr") for rank in range(len(mesh))]

    def all_have_said() -> bool:
        more = Collector()
        start_cell(mesh, "print('more')", on_output=more).future.get(30)
        said[:] = [said[rank] + more.text(rank, "stderr") for rank in range(len(mesh))]
        return all(said)

    wait_until(all_have_said)  # with the first of these cells, unless the thread that writes gets no time
    all_have_said()
    assert said == [f"its log is incomplete from here on: {why}\n"] * len(mesh), "said once"


@pytest.mark.slow
def test_output_reaches_the_notebook_when_its_log_cannot_grow(mesh2: ProcMesh) -> None:
    with limited(_agent_of(mesh2), resource.RLIMIT_FSIZE, 20_000):
        _check_chatter(mesh2, "file too large (the limit on the size of files was met: ulimit -f)")
    assert mesh2.run("dist.all_reduce(torch.ones(1)); rank").get(30).values() == [0, 1]


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 512 kB."""
    if os.getuid() or subprocess.run(["mount", "-t", "tmpfs", "-o", "size=512k", "tmpfs", tmp_path]).returncode:
        pytest.skip("no file system can be mounted here")
    yield tmp_path
    shutdown()
    subprocess.run(["umount", tmp_path], check=True)


@pytest.mark.slow
def test_a_full_disk_under_the_logs_costs_the_logs_only(small_disk: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    shutdown()
    monkeypatch.setenv("XDG_STATE_HOME", str(small_disk))
    with this_host().spawn_procs({"gpus": 2}) as mesh:
        filler = small_disk / "filler"
        with filler.open("wb", buffering=0) as file, pytest.raises(OSError, match="No space left"):
            while True:
                file.write(bytes(4096))
        why = "no space left on device (free some space)"
        _check_chatter(mesh, why)
        got = Collector()
        start_cell(mesh, "print('unlogged')", on_output=got).future.get(30)
        assert {(cut.rank, cut.size_bytes, cut.lacks) for cut in got.cuts} == {(rank, 0, why) for rank in range(2)}
        filler.unlink()
        time.sleep(2.1)
        mesh.run("print('there is room again')").get(30)
        log = ""

        def is_written() -> bool:
            nonlocal log
            log = Path(mesh.log_paths()[0]).read_text()
            return log.endswith("there is room again\n")

        wait_until(is_written)  # by a thread of its own, which the cell does not wait for
        assert "bytes are missing here: no space left on device" in log


def test_a_folder_that_cannot_be_made_is_a_spawn_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    shutdown()
    (tmp_path / f"meshbook-{os.getuid()}").write_text("in the way")
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    with pytest.raises(errors.SpawnError, match=r"file exists: .*meshbook-"):
        this_host().spawn_procs({"gpus": 1})


# ---- descriptors ---------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_an_agent_without_descriptors_refuses_a_spawn_and_serves_on(mesh2: ProcMesh) -> None:
    agent = _agent_of(mesh2)
    before = len(os.listdir(f"/proc/{agent}/fd"))
    with limited(agent, resource.RLIMIT_NOFILE, _first_free(agent) + 12):
        with pytest.raises(
            errors.SpawnError, match=rf"too many open files \(process {agent} may open \d+; raise ulimit"
        ):
            this_host().spawn_procs({"gpus": 8}, group=False)
        assert mesh2.run("dist.all_reduce(torch.ones(1)); rank").get(30).values() == [0, 1]
    assert len(os.listdir(f"/proc/{agent}/fd")) == before
    with this_host().spawn_procs({"gpus": 4}, group=False) as mesh:
        assert len(mesh.run("rank").get(30).values()) == 4


@pytest.mark.slow
def test_a_controller_without_descriptors_says_so_and_keeps_its_meshes(mesh2: ProcMesh) -> None:
    with limited(0, resource.RLIMIT_NOFILE, _first_free(os.getpid())):
        with pytest.raises(errors.MeshError, match=r"no shared memory for a payload of 4\.19 MB: too many open files"):
            mesh2.push({"big": torch.ones(MEGABYTE)})
        with pytest.raises(errors.MeshError, match="could not be mapped: Too many open files"):
            mesh2.evaluate("torch.ones(1 << 20)").get(30).values()
        with pytest.raises(
            errors.SpawnError, match=r"too many open files \(process \d+ may open \d+; raise ulimit -n\)"
        ):
            start_hosts({}, LocalLauncher())
        assert mesh2.run("rank").get(30).values() == [0, 1]
    mesh2.push({"big": torch.ones(MEGABYTE)}).get(30)


STARVED = """
import os, resource
import meshbook
from meshbook.system import os_errors
os_errors.ENOUGH_FILES = 0  # a system that allows no more
extra = [os.open("/dev/null", os.O_RDONLY) for _ in range(4)]
resource.setrlimit(resource.RLIMIT_NOFILE, (max(extra) + LEFT, 1 << 14))
try:
    meshbook.this_host().spawn_procs({"gpus": 1})
except meshbook.errors.SpawnError as error:
    print("SpawnError:", error)
else:
    print("started")
resource.setrlimit(resource.RLIMIT_NOFILE, (1 << 12, 1 << 14))
meshbook.shutdown()
with meshbook.this_host().spawn_procs({"gpus": 1}) as mesh:
    print(mesh.run("rank").get(30).values())
meshbook.shutdown()
"""


@pytest.mark.some("2")
@pytest.mark.slow
@pytest.mark.parametrize("left", [2, 6, 10])
def test_a_process_without_descriptors_cannot_begin_and_can_later(left: int) -> None:
    done = subprocess.run(
        [sys.executable, "-c", STARVED.replace("LEFT", str(left))], capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 0, done.stderr
    first, last = done.stdout.splitlines()
    assert first.startswith("SpawnError: ") and "too many open files" in first.lower()
    assert last == "[0]"


def test_a_rank_without_descriptors_fails_its_call_and_lives(mesh2: ProcMesh) -> None:
    mesh2.run("import os, resource; limits = resource.getrlimit(resource.RLIMIT_NOFILE); kept = rank").get(30)
    low = "resource.setrlimit(resource.RLIMIT_NOFILE, (max(map(int, os.listdir('/proc/self/fd'))), limits[1]))"
    mesh2.slice(gpus=1).run(low).get(30)
    with pytest.raises(errors.CallFailed, match=r"rank 1 raised .*[Tt]oo many open files"):
        mesh2.evaluate("torch.ones(1 << 20)").get(30)
    assert [status.state for status in mesh2.status()] == ["idle", "idle"]
    mesh2.slice(gpus=1).run("resource.setrlimit(resource.RLIMIT_NOFILE, limits)").get(30)
    assert mesh2.evaluate("kept, torch.ones(1 << 20).sum().item()").get(30).values() == [(0, 2**20), (1, 2**20)]


# ---- memory, processes ---------------------------------------------------------------------------------------------


def test_no_shared_memory_for_a_payload_is_told_where_the_call_is_made(mesh2: ProcMesh) -> None:
    with limited(0, resource.RLIMIT_FSIZE, 8 * MEGABYTE):
        with pytest.raises(errors.MeshError, match=r"no shared memory for a payload of 67\.1 MB: file too large"):
            mesh2.push({"big": torch.ones(16 * MEGABYTE)})
        assert mesh2.run("rank").get(30).values() == [0, 1]
    with pytest.raises(
        errors.CallFailed, match=r"ranks? \S+ raised MeshError: no shared memory for a payload of 67\.1 MB"
    ):
        mesh2.run("import resource; resource.setrlimit(resource.RLIMIT_FSIZE, (8 << 20, -1))").get(30)
        mesh2.evaluate("torch.ones(16 << 20)").get(30)
    assert mesh2.run("rank").get(30).values() == [0, 1]


@pytest.fixture
def few_processes() -> Iterator[Path]:
    """A cgroup in which no process can be forked."""
    roots = [Path("/sys/fs/cgroup/pids"), Path("/sys/fs/cgroup")]
    folder = next((root for root in roots if root.exists()), roots[0]) / f"meshbook-test-{os.getpid()}"
    try:
        folder.mkdir()
        (folder / "pids.max").write_text("1")
    except OSError as error:
        if folder.exists():
            folder.rmdir()
        pytest.skip(f"no cgroup that limits processes can be made here: {error}")
    yield folder
    folder.rmdir()


def test_workers_that_cannot_be_forked_are_a_spawn_error(mesh2: ProcMesh, few_processes: Path) -> None:
    template = _template_of(mesh2)
    (few_processes / "cgroup.procs").write_text(str(template))
    for allowed in (1, 3):  # the batch process itself; some of the workers
        (few_processes / "pids.max").write_text(str(allowed))
        began = time.monotonic()
        with pytest.raises(errors.SpawnError, match=r"a process could not be forked: .*the limit on processes was met"):
            this_host().spawn_procs({"gpus": 8}, group=False)
        assert time.monotonic() - began < 10
    (few_processes / "pids.max").write_text("max")
    with this_host().spawn_procs({"gpus": 2}, group=False) as mesh:
        assert mesh.run("rank").get(30).values() == [0, 1]
        (few_processes.parent / "cgroup.procs").write_text(str(template))
        for status in mesh.status():
            (few_processes.parent / "cgroup.procs").write_text(str(status.pid))
    assert mesh2.run("dist.all_reduce(torch.ones(1)); rank").get(30).values() == [0, 1]
    zombies = [child for child in psutil.Process(_agent_of(mesh2)).children() if child.status() == psutil.STATUS_ZOMBIE]
    deadline = time.monotonic() + 5
    while zombies and time.monotonic() < deadline:
        time.sleep(0.1)
        zombies = [z for z in zombies if z.is_running() and z.status() == psutil.STATUS_ZOMBIE]
    assert not zombies


FEW_FILES = """
import resource
from meshbook import LocalLauncher, start_hosts, this_host
from meshbook.errors import SpawnError

resource.setrlimit(resource.RLIMIT_NOFILE, (64, 600))
with this_host().spawn_procs({"gpus": 1}, torch=False) as mesh:
    print(resource.getrlimit(resource.RLIMIT_NOFILE)[0], mesh.run("rank").get(60).values())
try:
    start_hosts({"hosts": 300}, LocalLauncher(separate_hosts=True))
except SpawnError as error:
    print(error)
"""


def test_open_files_are_raised_to_what_the_system_allows_and_too_many_hosts_are_refused() -> None:
    done = subprocess.run([sys.executable, "-c", FEW_FILES], capture_output=True, text=True, timeout=120)
    limit, refused = done.stdout.splitlines()
    assert limit == "600 [0]", done.stderr
    assert refused.startswith("300 hosts need 900 open files here: too many open files (process "), refused
    assert refused.endswith(" may open 600; raise ulimit -n)."), refused
