"""It starts where people are: users without a home, folders of others, hosts without IPv4, kernels without pidfds."""

from __future__ import annotations

import json
import os
import platform
import shlex
import shutil
import subprocess
import sys
import tempfile
import textwrap
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from old_kernel import NUMBERS, run_on_old_kernel

NOBODY = 45678
"""A uid without an entry in the passwd file."""

TIMEOUT_S = 110

FIND = """
    import json, warnings
    with warnings.catch_warnings(record=True) as told:
        from meshbook.system.user_folders import log_base, runtime_base
        found = {"runtime": str(runtime_base()), "logs": str(log_base()), "again": str(log_base())}
        print(json.dumps({**found, "told": [str(one.message) for one in told]}))
"""

SPAWN = """
    import time
    from pathlib import Path
    from meshbook import this_host
    with this_host().spawn_procs({"gpus": 2}) as mesh:
        sums = mesh.run("x = torch.ones(2); dist.all_reduce(x); print('said'); x.tolist()").get(60)
        print(sums.values())
        until = time.monotonic() + 30
        texts = [""]
        while "" in texts and time.monotonic() < until:
            texts = [Path(path).read_text() for path in mesh.log_paths().values()]
        print(texts)
"""


@pytest.fixture
def world() -> Iterator[Path]:
    """A folder that everybody may enter and write, as the temp folder is; pytest's own are for one user."""
    with tempfile.TemporaryDirectory() as folder:
        os.chmod(folder, 0o1777)
        yield Path(folder)


def run_as_nobody(code: str, world: Path, **variables: str) -> subprocess.CompletedProcess[str]:
    """Run Python as `NOBODY`, with the temp folder ``world`` and of the environment only ``variables``.

    It may read what root may, since the Python that runs the tests often lies in root's home.
    """
    if os.getuid() != 0 or shutil.which("setpriv") is None:
        pytest.skip("only root can become another user, by setpriv")
    rights = "--inh-caps=+dac_read_search --ambient-caps=+dac_read_search"
    become = f"setpriv --reuid={NOBODY} --regid={NOBODY} --clear-groups {rights}".split()
    environment = {"PATH": os.environ["PATH"], "TMPDIR": str(world), "MESHBOOK_LEASE_S": "5", **variables}
    return subprocess.run(
        [*become, sys.executable, "-c", textwrap.dedent(code)],
        cwd="/", env=environment, umask=0o022, capture_output=True, text=True, timeout=TIMEOUT_S, check=False,
    )  # fmt: skip


def find(world: Path, **variables: str) -> dict[str, Any]:
    """What `FIND` prints."""
    ran = run_as_nobody(FIND, world, **variables)
    assert ran.returncode == 0, ran.stderr
    found: dict[str, Any] = json.loads(ran.stdout)
    assert found["logs"] == found["again"]
    return found


@pytest.mark.slow
def test_a_mesh_starts_without_a_home_or_a_runtime_folder_and_beside_a_squatter(world: Path) -> None:
    (world / f"meshbook-{NOBODY}").mkdir()
    ran = run_as_nobody(SPAWN, world, XDG_RUNTIME_DIR="/run/user/of-somebody-gone")
    assert ran.returncode == 0, ran.stderr
    assert ran.stdout.splitlines()[-2:] == [str([[2.0, 2.0]] * 2), str(["said\n"] * 2)]
    assert ran.stderr.count("Set XDG_STATE_HOME to keep them") == 1, ran.stderr
    assert list((world / f"meshbook-{NOBODY}.1").glob(".kept/logs/*/*/rank-1.log"))


@pytest.mark.parametrize(
    "variables",
    [{}, {"HOME": "/nonexistent"}, {"HOME": "/proc"}, {"HOME": "/root"}, {"XDG_STATE_HOME": "/sys"}],
    ids=["no_home", "missing", "read_only", "anothers", "state"],
)
def test_without_a_home_logs_lie_with_the_session_and_one_word_says_so(world: Path, variables: dict[str, str]) -> None:
    found = find(world, **variables)
    assert found["runtime"] == f"{world}/meshbook-{NOBODY}"
    assert found["logs"] == f"{world}/meshbook-{NOBODY}/.kept/logs"
    assert len(found["told"]) == 1 and "Set XDG_STATE_HOME" in found["told"][0]


def test_logs_of_another_user_in_an_inherited_home_are_left_alone(world: Path) -> None:
    theirs = world / ".local" / "state" / "meshbook" / "logs"
    theirs.mkdir(parents=True)
    found = find(world, HOME=str(world))
    assert found["logs"].endswith(".kept/logs") and "belongs to another user" in found["told"][0]
    assert not list(theirs.iterdir())


@pytest.mark.parametrize("inherited", ["/run/user/of-somebody-gone", "/root", "/proc", "relative"])
def test_a_runtime_folder_that_is_not_ours_is_passed_over(world: Path, inherited: str) -> None:
    found = find(world, HOME=str(world), XDG_RUNTIME_DIR=inherited)
    assert found["runtime"] == f"{world}/meshbook-{NOBODY}"
    assert found["logs"] == f"{world}/.local/state/meshbook/logs" and not found["told"]


def test_a_squatter_in_the_temp_folder_costs_a_name_for_good(world: Path) -> None:
    taken = world / f"meshbook-{NOBODY}"
    taken.mkdir(mode=0o777)
    (world / f"meshbook-{NOBODY}.1").symlink_to(taken)
    first = find(world, HOME=str(world))["runtime"]
    assert first == f"{world}/meshbook-{NOBODY}.2" and Path(first).stat().st_mode & 0o777 == 0o700
    taken.rmdir()  # nobody may lose sight of their sessions by that
    assert find(world, HOME=str(world))["runtime"] == first


def test_squatters_of_all_names_are_told_of(world: Path) -> None:
    for number in range(10):
        (world / f"meshbook-{NOBODY}{f'.{number}' if number else ''}").mkdir()
    ran = run_as_nobody(FIND, world, HOME=str(world))
    assert "SpawnError: other users have taken all names" in ran.stderr and "Set XDG_RUNTIME_DIR" in ran.stderr


# ---- kernels without pidfds or memory files --------------------------------------------------------------------------

OLD_KERNEL = """
    import gc, os, signal
    import torch
    from buffer_ranks import Owner
    from meshbook import errors, this_host
    from meshbook.system.memory_files import has_memfds
    from meshbook.system.exits import end_process, has_pidfds
    from meshbook.system.processes import start_time

    print(has_pidfds(), has_memfds())
    big = torch.arange(1 << 20, dtype=torch.float32)
    with this_host().spawn_procs({"gpus": 2}) as mesh:
        mesh.push({"big": big}).get(60)
        mesh.run("dist.all_reduce(big)").get(60)
        print(all(torch.equal(got, 2 * big) for got in mesh.pull("big").get(60).values()))
        into = torch.zeros(1 << 20)
        mesh.spawn("owners", Owner).slice(gpus=1).make.call_one(1 << 20, 3.0).get(60).read_into(into).get(60)
        print(into.unique().tolist())
        pid = mesh.run("import os; os.getpid()").get(60).values()[1]
        waiting = mesh.run("import time; time.sleep(0 if rank == 0 else 60)")
        os.kill(pid, signal.SIGKILL)
        try:
            waiting.get(30)
        except errors.MeshError as error:
            print("killed by SIGKILL" in str(error))
        mesh.heal()
        print(mesh.run("x = torch.ones(1); dist.all_reduce(x); x.item()").get(60).values())
        agent = mesh._mesh.hosts[0].hello.pid
        began = start_time(agent)
    os.kill(agent, signal.SIGSTOP)
    end_process(agent, began, 0.0)
    print(start_time(agent) in (None, began))
"""


def old_kernel(refusal: str, calls: str, code: str) -> subprocess.CompletedProcess[str]:
    """Run Python as on a kernel without ``calls``."""
    if platform.machine() not in NUMBERS:
        pytest.skip(f"the numbers of system calls of {platform.machine()} are not known here")
    return run_on_old_kernel(refusal, calls, code, TIMEOUT_S)


@pytest.mark.some("ENOSYS-memfd_create,pidfd_open,pidfd_send_signal")
@pytest.mark.slow
@pytest.mark.parametrize(
    ("refusal", "calls"),
    [
        ("ENOSYS", "memfd_create,pidfd_open,pidfd_send_signal"),
        pytest.param("EPERM", "pidfd_open", marks=pytest.mark.slow),
        pytest.param("EPERM", "memfd_create", marks=pytest.mark.slow),
    ],
)
def test_meshes_live_on_kernels_without_pidfds_or_memory_files(refusal: str, calls: str) -> None:
    before = set(os.listdir("/dev/shm"))
    ran = old_kernel(refusal, calls, OLD_KERNEL)
    assert ran.returncode == 0, ran.stderr
    has_pidfds, has_memfds = "pidfd_open" not in calls, "memfd_create" not in calls
    results = [True, [3.0], True, [2.0, 2.0], True]
    assert ran.stdout.splitlines()[-6:] == [f"{has_pidfds} {has_memfds}", *map(str, results)], ran.stdout + ran.stderr
    assert not [name for name in set(os.listdir("/dev/shm")) - before if name.startswith("meshbook")]


ENDS = """
    import os, select, subprocess, sys, threading, time
    from meshbook.system.exits import open_end
    first, second = (subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) for _ in range(2))
    fds = [open_end(process.pid) for process in (first, second)]
    print(select.select(fds, [], [], 0.2)[0])
    first.kill()
    print(select.select(fds, [], [], 30)[0] == fds[:1])
    os.close(fds[1])
    os.close(fds[0])
    deadline = time.monotonic() + 30
    while threading.active_count() > 1 and time.monotonic() < deadline:
        time.sleep(0.01)
    print(threading.active_count())
    second.kill(), first.wait(), second.wait()
    try:
        open_end(first.pid)
    except ProcessLookupError:
        print("gone")
    if not os.fork():
        child = open_end(os.getppid())
        os._exit(bool(select.select([child], [], [], 0.2)[0]))
    print(os.wait()[1])
"""


@pytest.mark.parametrize("calls", ["pidfd_open", "memfd_create"])
def test_ends_of_processes_are_seen_with_and_without_pidfds(calls: str) -> None:
    ran = old_kernel("ENOSYS", calls, ENDS)
    assert ran.stdout.splitlines() == ["[]", "True", "1", "gone", "0"], ran.stdout + ran.stderr


# ---- systems other than Linux ----------------------------------------------------------------------------------------

NO_LINUX = """
    import asyncio, ctypes, fcntl, importlib, mmap, multiprocessing.pool, os, pkgutil, select, signal, socket, sys, time
    import IPython, ipykernel.ipkernel, ipykernel.kernelapp, torch.distributed, zmq
    LINUX = {
        os: ["eventfd", "eventfd_read", "eventfd_write", "memfd_create", "pidfd_open", "P_PIDFD", "sched_getaffinity",
             "sched_setaffinity", "pipe2", "posix_fadvise", "splice", "copy_file_range", "getrandom"],
        select: ["epoll"],
        fcntl: ["F_SETPIPE_SZ", "F_GETPIPE_SZ", "F_OFD_SETLK", "F_OFD_SETLKW", "F_ADD_SEALS", "F_GET_SEALS"],
        signal: ["SIGRTMIN", "SIGRTMAX", "SIGPWR", "sigwaitinfo", "sigtimedwait", "pidfd_send_signal"],
        socket: ["SO_PEERCRED", "SO_BINDTODEVICE", "SOCK_CLOEXEC", "SOCK_NONBLOCK"],
        time: ["CLOCK_BOOTTIME"],
        mmap: ["MAP_POPULATE"],
    }
    for module, names in LINUX.items():
        for name in names + [name for name in dir(module) if name.startswith(("EFD_", "MFD_", "EPOLL"))]:
            vars(module).pop(name, None)
    find = ctypes.CDLL.__getattr__
    def find_on_mac(library, name):
        if name in ("prctl", "tgkill", "process_vm_readv", "process_vm_writev"):
            raise AttributeError(name)
        return find(library, name)
    ctypes.CDLL.__getattr__ = find_on_mac
    import meshbook, meshbook_extension, meshbook_kernel
    for package in (meshbook, meshbook_extension, meshbook_kernel):
        for module in pkgutil.walk_packages(package.__path__, package.__name__ + "."):
            if not module.name.endswith("__main__"):
                importlib.import_module(module.name)
    from meshbook import errors, this_host
    try:
        this_host().spawn_procs({"gpus": 2})
    except errors.SpawnError as error:
        print(error)
    print(meshbook.Extent.of({"gpus": 2}).sizes)
"""


@pytest.mark.nightly
def test_on_other_systems_imports_work_and_spawn_says_in_a_sentence_what_it_needs() -> None:
    ran = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(NO_LINUX)],
        capture_output=True, text=True, timeout=TIMEOUT_S, check=False,
    )  # fmt: skip
    assert ran.returncode == 0, ran.stderr
    told, extent = ran.stdout.splitlines()
    assert (
        told.startswith("Meshes run on Linux: this system") and "epoll, eventfd, prctl" in told and "container" in told
    )
    assert extent == "[2]"


# ---- hosts without IPv4 ----------------------------------------------------------------------------------------------

ONLY_IPV6 = """
    import torch
    from buffer_ranks import Owner
    from meshbook import LocalLauncher, start_hosts
    from meshbook.system.interfaces import loopback_address, own_address

    print(loopback_address(), own_address())
    hosts = start_hosts({"hosts": 2}, LocalLauncher(separate_hosts=True))
    with hosts.spawn_procs({"gpus": 1}, owns_hosts=True) as mesh:
        print(mesh.run("x = torch.ones(1); dist.all_reduce(x); x.item()").get(60).values())
        into = torch.zeros(4 << 20)
        mesh.spawn("owners", Owner).slice(hosts=1).make.call_one(4 << 20, 3.0).get(60).read_into(into).get(60)
        print(into.unique().tolist())
"""


@pytest.mark.slow
@pytest.mark.some("routed")
@pytest.mark.parametrize(
    ("more", "own"),
    [
        pytest.param("true", "::1", id="loopback"),
        pytest.param(
            "ip addr add fd77::7/128 dev lo nodad && ip -6 route add default dev lo src fd77::7", "fd77::7", id="routed"
        ),
    ],
)
def test_meshes_live_on_hosts_that_have_ipv6_only(more: str, own: str) -> None:
    if not all(map(shutil.which, ("ip", "unshare"))):
        pytest.skip("iproute2 or unshare is missing")
    inside = ["unshare", "--net", "sh", "-ec"]
    bare = f"ip link set lo up && ip addr flush dev lo && ip addr add ::1/128 dev lo && {more}"
    if subprocess.run([*inside, bare], capture_output=True, timeout=20, check=False).returncode:
        pytest.skip("no network namespace with IPv6 only can be made here")
    command = f"{bare} && exec {shlex.quote(sys.executable)} -c {shlex.quote(textwrap.dedent(ONLY_IPV6))}"
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[2] / "support")}
    ran = subprocess.run(
        [*inside, command], env=environment, capture_output=True, text=True, timeout=TIMEOUT_S, check=False
    )
    assert ran.returncode == 0, ran.stderr
    assert ran.stdout.splitlines()[-3:] == [f"::1 {own}", "[2.0, 2.0]", "[3.0]"], ran.stdout + ran.stderr
