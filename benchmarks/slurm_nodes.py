"""A real Slurm of our own on loopback, in a folder of its own: one slurmctld, and a slurmd for each node."""

from __future__ import annotations

import contextlib
import os
import pwd
import shutil
import signal
import socket
import subprocess
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

from benchmarks.ssh_hosts import NoDaemonError, end_with_parent

READY_S = 60
_PATH = f"{os.environ.get('PATH', '')}:/usr/sbin:/sbin"
_PROGRAMS = ("munged", "slurmctld", "slurmd", "salloc", "srun", "squeue", "scancel", "scontrol", "sinfo")

_CONFIG = """
ClusterName=loopback
SlurmctldHost={host}(127.0.0.1)
SlurmctldPort={port}
SlurmUser={user}
SlurmdUser={user}
AuthType=auth/munge
AuthInfo=socket={folder}/munge/socket
CryptoType=crypto/munge
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool/%n
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd-%n.pid
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
SchedulerParameters=sched_interval=1,bf_interval=1
MpiDefault=none
ReturnToService=2
SlurmdTimeout=10
KillWait=2
SlurmdParameters=config_overrides
AccountingStorageType=accounting_storage/none
JobAcctGatherType=jobacct_gather/none
SwitchType=switch/none
PropagateResourceLimits=NONE
{nodes}
PartitionName=main Nodes={names} Default=YES MaxTime=INFINITE State=UP
"""


class SlurmNodes:
    """Daemons that run. environment: what the commands of Slurm need to find them."""

    def __init__(self, folder: Path, names: Sequence[str], daemons: dict[str, subprocess.Popen[bytes]]) -> None:
        self.folder, self.names, self.daemons = folder, tuple(names), daemons
        self.environment = {"SLURM_CONF": str(folder / "slurm.conf")}

    def ask(self, *command: str) -> str:
        """What a command of Slurm says. Raises: subprocess.CalledProcessError."""
        return subprocess.run(
            command,
            env={**os.environ, **self.environment},
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            check=True,
            timeout=60,
        ).stdout

    def queue(self) -> list[str]:
        """The jobs that wait or run, as ``12 PENDING``."""
        return self.ask("squeue", "-h", "-t", "PENDING,RUNNING", "-o", "%i %T").splitlines()


@contextlib.contextmanager
def slurm_nodes(count: int = 3) -> Iterator[SlurmNodes]:
    """Nodes n1, n2, ... of 4 cores each, which are not there. Raises: NoDaemonError."""
    missing = [program for program in _PROGRAMS if shutil.which(program, path=_PATH) is None]
    if missing:
        raise NoDaemonError(f"there is no {missing[0]}: apt-get install slurmctld slurmd slurm-client munge")
    names = [f"n{number}" for number in range(1, count + 1)]
    with tempfile.TemporaryDirectory(prefix="mb-slurm-") as path, contextlib.ExitStack() as stack:
        nodes = SlurmNodes(Path(path), names, {})
        stack.callback(_end, nodes)
        _write(nodes)
        _start(nodes)
        _await(nodes)
        yield nodes


def _write(nodes: SlurmNodes) -> None:
    """Write the configs, with ports that are free now."""
    folder, host = nodes.folder, socket.gethostname().partition(".")[0]
    folder.chmod(0o755)
    for name in ("munge", "state", "spool", *(f"spool/{name}" for name in nodes.names)):
        (folder / name).mkdir(mode=0o700 if name == "munge" else 0o755)
    (folder / "munge/key").write_bytes(os.urandom(1024))
    (folder / "munge/key").chmod(0o400)
    with contextlib.ExitStack() as stack:
        probes = [stack.enter_context(socket.create_server(("127.0.0.1", 0))) for _ in range(len(nodes.names) + 1)]
        ports = [probe.getsockname()[1] for probe in probes]
    lines = [
        f"NodeName={name} NodeHostname={host} NodeAddr=127.0.0.1 Port={port} CPUs=4 RealMemory=4000 State=UNKNOWN"
        for name, port in zip(nodes.names, ports[1:], strict=True)
    ]
    user = pwd.getpwuid(os.getuid()).pw_name
    config = _CONFIG.format(
        host=host, port=ports[0], user=user, folder=folder, nodes="\n".join(lines), names=",".join(nodes.names)
    )
    (folder / "slurm.conf").write_text(config)
    (folder / "cgroup.conf").write_text("CgroupPlugin=cgroup/v1\n")


def _start(nodes: SlurmNodes) -> None:
    munge = nodes.folder / "munge"
    files = {"key-file": "key", "socket": "socket", "pid-file": "pid", "log-file": "log", "seed-file": "seed"}
    places = [f"--{option}={munge / name}" for option, name in files.items()]
    _start_daemon(nodes, "munged", "--foreground", "--force", *places)
    deadline = time.monotonic() + READY_S
    while not (munge / "socket").exists() and time.monotonic() < deadline:
        time.sleep(0.02)
    _start_daemon(nodes, "slurmctld", "-D")
    for name in nodes.names:
        start_node(nodes, name)


def start_node(nodes: SlurmNodes, name: str) -> None:
    """Start the daemon of a node."""
    _start_daemon(nodes, "slurmd", "-D", "-N", name, key=name)


def _start_daemon(nodes: SlurmNodes, program: str, *arguments: str, key: str = "") -> None:
    found = shutil.which(program, path=_PATH)
    assert found is not None
    with (nodes.folder / f"{key or program}.log").open("ab") as log:
        nodes.daemons[key or program] = subprocess.Popen(
            [found, *arguments],
            env={**os.environ, **nodes.environment},
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            start_new_session=True,
            preexec_fn=end_with_parent,
        )


def _await(nodes: SlurmNodes) -> None:
    """Wait until all nodes are idle. Raises: NoDaemonError."""
    deadline, said = time.monotonic() + READY_S, ""
    while time.monotonic() < deadline:
        with contextlib.suppress(subprocess.CalledProcessError):
            said = nodes.ask("sinfo", "-h", "-N", "-o", "%T")
            if said.split() == ["idle"] * len(nodes.names):
                return
        if ended := [name for name, daemon in nodes.daemons.items() if daemon.poll() is not None]:
            raise NoDaemonError(f"{ended[0]} ended: {(nodes.folder / f'{ended[0]}.log').read_text()[-1000:]}")
        time.sleep(0.1)
    raise NoDaemonError(f"the nodes of Slurm are not idle after {READY_S} s: {said}")


def _end(nodes: SlurmNodes) -> None:
    """End the daemons, munged last: the others speak by it."""
    for daemon in reversed(nodes.daemons.values()):
        daemon.send_signal(signal.SIGTERM)
        try:
            daemon.wait(10)
        except subprocess.TimeoutExpired:
            daemon.kill()
            daemon.wait()
