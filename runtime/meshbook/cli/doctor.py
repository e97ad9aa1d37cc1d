"""``meshbook doctor``: this machine as an issue needs it, on one screen, and the way to mend each fault.

Each look gives facts and faults; the last one starts two ranks. Values of variables of the environment are not shown,
since some are secrets.
"""

from __future__ import annotations

import argparse
import importlib
import importlib.metadata
import json
import os
import platform
import resource
import shutil
import subprocess
import sys
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from importlib import util
from pathlib import Path
from typing import NamedTuple

from meshbook._version import __version__
from meshbook.cli import FAILED, Subparsers
from meshbook.formatting import Table, format_bytes
from meshbook.launchers.registry import ENGINES
from meshbook.sessions.listing import sessions
from meshbook.system.devices import count_cores, count_cuda_devices
from meshbook.system.exits import has_pidfds
from meshbook.system.os_errors import explain
from meshbook.system.user_folders import log_base, runtime_base

NEEDED, FURTHER = ("ipykernel", "jupyter_client", "ipywidgets", "anywidget"), ("IPython", "jupyterlab", "notebook")
"""The packages of a notebook, and others that matter in issues."""
KERNELSPECS_S, RANKS_S = 30.0, 120.0
"""The time that Jupyter has to list its kernels, and that ranks have for each step."""
SHARED_BYTES, FREE_BYTES = 1 << 30, 256 << 20
"""The least size of /dev/shm, and the least room in a folder."""
FILES, SOCKET_CHARS = 4096, 107
"""The fewest open files that many ranks need; the longest path of a Unix socket, unix(7)."""
SUM = """
import time
ones = torch.ones(1 << 18, device=device)
dist.all_reduce(ones)
begun = time.perf_counter()
dist.all_reduce(ones)
report = float(ones[0]), time.perf_counter() - begun, dist.get_backend()
"""


class Fact(NamedTuple):
    """A line of the report."""

    name: str
    value: str


class Fault(NamedTuple):
    """A finding. weight: 2 where nothing works with it, 1 where something does not, 0 for a hint."""

    weight: int
    what: str
    mend: str


def add_parser(subparsers: Subparsers) -> None:
    """Add the parser of the command."""
    about = "Look at this machine, start two ranks, and say what is wrong and how to mend it. Paste it into an issue."
    parser = subparsers.add_parser("doctor", description=about, allow_abbrev=False)
    parser.add_argument("--json", action="store_true", help="for programs")


def main(args: argparse.Namespace) -> int:
    """Print the report; returns 1 where something is wrong."""
    facts, faults = _gather((versions, jupyter, limits, folders, engines))
    if not args.json:
        print(Table((), facts), flush=True)
    ranks, more = _gather((two_ranks,))
    faults = sorted(faults + more, key=lambda fault: -fault.weight)
    is_wrong = any(fault.weight for fault in faults)
    if args.json:
        print(json.dumps({"facts": dict(facts + ranks), "faults": [each._asdict() for each in faults]}, indent=2))
    else:
        print("\n".join(f"{name:{max(len(fact.name) for fact in facts)}}  {value}" for name, value in ranks))
        for weight, what, mend in faults:
            print(f"\n{'wrong' if weight else 'hint'}: {what}\n  mend: {mend}")
        print("" if is_wrong else "\nnothing is wrong")
    return FAILED if is_wrong else 0


def _gather(looks: Sequence[Callable[[], Iterator[Fact | Fault]]]) -> tuple[list[Fact], list[Fault]]:
    found: list[Fact | Fault] = []
    for look in looks:
        try:
            found += look()
        except Exception as error:  # the report is to be whole, however broken the machine is
            why = explain(error) if isinstance(error, OSError) else f"{type(error).__name__}: {error}"
            found.append(Fault(1, f"{look.__name__.replace('_', ' ')} cannot be looked at: {why}", "see the cause"))
    return [each for each in found if isinstance(each, Fact)], [each for each in found if isinstance(each, Fault)]


def versions() -> Iterator[Fact | Fault]:
    """Look at Python, PyTorch and the devices."""
    yield Fact("meshbook", f"{__version__}, {Path(__file__).parents[1]}")
    yield Fact("python", f"{platform.python_version()}, {sys.executable}")
    yield Fact("system", f"{platform.platform()}, {count_cores()} cores")
    try:
        torch = importlib.import_module("torch")
    except Exception as error:  # libraries that are missing raise anything
        yield Fact("torch", "cannot be imported")
        yield Fault(
            2, f"torch cannot be imported: {type(error).__name__}: {error}", "pip install --force-reinstall torch"
        )
        return
    cuda, gpus = torch.version.cuda, count_cuda_devices()
    nccl = ".".join(map(str, torch.cuda.nccl.version())) if cuda and torch.distributed.is_nccl_available() else "none"
    names = [torch.cuda.get_device_name(number) for number in range(torch.cuda.device_count())]
    yield Fact("torch", f"{torch.__version__}, CUDA {cuda or 'none'}, NCCL {nccl}")
    yield Fact("gpus", f"{gpus} {', '.join(dict.fromkeys(names))}".rstrip())
    if gpus and not names:
        mend = "update NVIDIA's driver, or install the torch that fits it: https://pytorch.org/get-started/locally"
        yield Fault(1, f"there are {gpus} GPUs, and torch {torch.__version__} can use none of them", mend)


def jupyter() -> Iterator[Fact | Fault]:
    """Look at Jupyter's packages and kernels."""
    found = {name: util.find_spec(name) and importlib.metadata.version(name) for name in (*NEEDED, *FURTHER)}
    yield Fact("jupyter", ", ".join(f"{name} {version}" for name, version in found.items() if version) or "none")
    if missing := [name for name in NEEDED if not found[name]]:
        yield Fault(1, f"notebooks miss {', '.join(missing)}", 'pip install "meshbook[notebook]"')
        return
    command = [sys.executable, "-m", "jupyter_client.kernelspecapp", "list", "--json"]
    try:
        told = subprocess.run(command, capture_output=True, text=True, timeout=KERNELSPECS_S, stdin=subprocess.DEVNULL)
        specs = json.loads(told.stdout)["kernelspecs"]
    except (subprocess.TimeoutExpired, ValueError, KeyError) as error:
        yield Fault(1, f"Jupyter does not list its kernels: {error}", "python -m jupyter kernelspec list tells why")
        return
    for name, each in specs.items():
        program, *arguments = each["spec"].get("argv") or ["nothing"]
        program = sys.executable if program in ("python", "python3") else program  # as Jupyter reads it
        yield Fact(f"kernel {name}", f"{program}, {each['resource_dir']}")
        if shutil.which(program) is None:
            yield Fault(1, f"kernel {name} names {program}, which is not there", f"jupyter kernelspec remove {name}")
        elif "meshbook_kernel" in arguments and os.path.isabs(program) and program != sys.executable:
            mend = "if that is not meant: meshbook kernel install"
            yield Fault(0, f"kernel {name} runs {program}, not this {sys.executable}", mend)
    if not any("meshbook_kernel" in each["spec"].get("argv", ()) for each in specs.values()):
        yield Fault(1, "Jupyter of this Python has no Meshbook kernel", "meshbook kernel install")


def limits() -> Iterator[Fact | Fault]:
    """Look at the means and limits of the system."""
    kinds = {"files": resource.RLIMIT_NOFILE, "processes": resource.RLIMIT_NPROC, "locked": resource.RLIMIT_MEMLOCK}
    most = {name: resource.getrlimit(kind)[1] for name, kind in kinds.items()}
    texts = (f"{name} {'unlimited' if value == resource.RLIM_INFINITY else value}" for name, value in most.items())
    yield Fact("ulimits", ", ".join(texts))
    if resource.RLIM_INFINITY != most["files"] < FILES:
        yield Fault(
            1, f"a process may open {most['files']} files, too few for many ranks", f"ulimit -Hn {FILES} or more"
        )
    yield Fact("pidfd", "yes" if has_pidfds() else "no: ends of processes are seen up to 50 ms later")
    spy = shutil.which("py-spy", path=f"{Path(sys.executable).parent}{os.pathsep}{os.environ.get('PATH', '')}")
    yield Fact("py-spy", spy or "none")
    if spy is None:
        yield Fault(0, "stacks of stopped ranks and of native code need py-spy", "pip install 'meshbook[stacks]'")
    set_here = sorted(name for name in os.environ if name.startswith(("MESHBOOK_", "NCCL_", "GLOO_", "TORCH_")))
    yield Fact("variables set", ", ".join(set_here) or "none")
    room = os.statvfs("/dev/shm")
    size, free = room.f_blocks * room.f_frsize, room.f_bavail * room.f_frsize
    yield Fact("/dev/shm", f"{format_bytes(free)} free of {format_bytes(size)}")
    if size < SHARED_BYTES:
        mend = "in a container: docker run --shm-size=8g, or an emptyDir with medium Memory; else: mount -o remount"
        yield Fault(1, f"/dev/shm has {format_bytes(size)}, too little for NCCL and data loaders", mend)
    elif free < FREE_BYTES:
        yield Fault(1, f"/dev/shm has {format_bytes(free)} free", "remove files that ended programs have left there")


def folders() -> Iterator[Fact | Fault]:
    """Look at the folders of sessions and logs."""
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        places = {"sessions": runtime_base(), "logs": log_base()}
    for name, folder in places.items():
        room = os.statvfs(folder)
        free = room.f_bavail * room.f_frsize
        yield Fact(name, f"{folder}, {format_bytes(free)} free")
        if free < FREE_BYTES:
            yield Fault(1, f"{folder} has {format_bytes(free)} free", "free some space there")
    for warning in told:
        yield Fault(0, str(warning.message), "set XDG_STATE_HOME to a folder that stays")
    if len(f"{places['sessions']}/01234567/control") > SOCKET_CHARS:
        yield Fault(2, f"the path {places['sessions']} is too long for sockets", "set XDG_RUNTIME_DIR to a shorter one")
    yield Fact("meshes", str(sum(len(each.meshes) for each in sessions())))


def engines() -> Iterator[Fact | Fault]:
    """Look for the engines that start hosts."""
    lacks = {name: engine.missing for name, engine in ENGINES.items()}
    yield Fact("engines", ", ".join(f"{name} (no {missing})" if missing else name for name, missing in lacks.items()))


def two_ranks() -> Iterator[Fact | Fault]:
    """Start two ranks, and have them sum."""
    from meshbook.mesh.driven import shutdown, this_host

    device = "cuda" if count_cuda_devices() >= 2 else "cpu"
    begun = time.monotonic()
    try:
        ranks = this_host().spawn_procs({"gpus": 2}, name="doctor", device=device, within_s=RANKS_S)
        ready_s = time.monotonic() - begun
        ranks.run(SUM).get(RANKS_S)
        reports = ranks.pull("report").get(RANKS_S).values()
    except Exception as error:  # the report is to be whole, whatever goes wrong here
        yield Fact("two ranks", f"failed after {time.monotonic() - begun:.1f} s")
        yield Fault(
            2, f"two ranks on {device} do not work: {error}", f"the logs of agents and ranks are in {log_base()}"
        )
        return
    finally:
        shutdown()
    total, took_s, backend = max(reports, key=lambda report: report[1])
    yield Fact(
        "two ranks", f"{device}, up in {ready_s:.2f} s; all_reduce of 1 MB by {backend} in {1000 * took_s:.2f} ms"
    )
    if any(report[0] != 4.0 for report in reports):
        yield Fault(
            2, f"two sums of two ranks on {device} give {total:g}, not 4", "see the tests of NCCL, or the network"
        )
