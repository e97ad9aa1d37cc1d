"""Who starts hosts, as ``--on`` says it: of a new mesh, of hosts beside those that it has, and in their places."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from meshbook.formatting import did_you_mean
from meshbook_extension.notebook.grammar import Arguments, Option
from meshbook_extension.output.labels import parse_duration

if TYPE_CHECKING:
    from meshbook.launchers.base import Launcher
    from meshbook.mesh.proc_mesh import ProcMesh

HOSTS = "hosts"
"""The axis that counts machines; all others count processes on each."""

COUNTED = {
    "slurm": "nodes of Slurm",
    "ray": "nodes of Ray",
    "manual": "hosts you will start",
    "mpi": "hosts of mpirun",
    "batch": "jobs, one for each host",
    "k8s": "pods of Kubernetes",
}
"""What hosts are called of engines that are told how many there are to be."""

ENGINES = ("local", "ssh", "slurm", "k8s", "ray", "mpi", "batch", "manual")

ON = Option(
    "--on",
    "who starts the hosts: local, ssh on hosts that are named, slurm, k8s, ray, mpi, a batch scheduler, or you",
    str,
    "local|ssh:HOST,..|slurm|k8s|ray[:ADDRESS]|mpi[:MPIRUN]|batch:SCHEDULER|manual[:ADDRESS]",
)
PYTHON = Option("--python", "the interpreter on hosts elsewhere", str, "PATH")
WITHIN = Option(
    "--within", "how long it may go without progress (2m), or hosts of manual take to come (30m)", str, "TIME"
)


def read_engine(arguments: Arguments, device: str | None, count_ranks: Callable[[], int]) -> Launcher:
    """Who starts the hosts. device: of the ranks. count_ranks: says how many each host has. Raises: UsageError."""
    from meshbook.launchers.local import LocalLauncher

    text = arguments.text("--on") or "local"
    engine, colon, named = text.partition(":")
    if engine not in ENGINES:
        near = did_you_mean(engine, ENGINES)
        there = "local, slurm, k8s, ray, mpi, manual, batch:pbs and others, and ssh with hosts: ssh:nodeA,nodeB"
        raise arguments.grammar.refuse(f'unknown engine "{engine}".{near} There is: {there}.', "ssh:")
    if engine == "ssh":
        if not named:
            raise arguments.grammar.refuse("ssh needs the names of hosts, as your ssh config has them.", "ssh:")
        from meshbook.launchers.ssh import SSHLauncher

        return SSHLauncher(named.split(","), python=arguments.text("--python"), options=arguments.rest)
    if engine == "ray":
        return _read_ray(arguments, named, device, count_ranks())
    if engine == "mpi":
        from meshbook.launchers.mpi import MPILauncher

        return MPILauncher(program=named, python=arguments.text("--python"), options=arguments.rest)
    if engine == "batch":
        return _read_batch(arguments, named)
    if engine == "manual":
        return _read_manual(arguments, named)
    if colon:
        raise arguments.grammar.refuse(f'the engine {engine} has no hosts to name, but got "{named}".')
    if engine == "slurm":
        from meshbook.launchers.slurm import SlurmLauncher

        return SlurmLauncher(python=arguments.text("--python"), options=arguments.rest)
    if engine == "k8s":
        from meshbook.launchers.k8s import KubernetesLauncher

        gpus = [f"--gpus={count_ranks()}"] if device == "cuda" else []
        return KubernetesLauncher(python=arguments.text("--python"), options=[*gpus, *arguments.rest])
    _refuse_rest(arguments, engine)
    if arguments.text("--python") is not None:
        raise arguments.grammar.refuse("--python is for hosts elsewhere; ranks here run on the notebook's own.", "ssh:")
    return LocalLauncher(torch=not arguments.flag("--no-torch"))


def _read_ray(arguments: Arguments, address: str, device: str | None, ranks: int) -> Launcher:
    from meshbook.launchers.ray import RayLauncher

    given = " ".join(arguments.rest)
    options = [f"--num-gpus={ranks}"] if device == "cuda" and "--num-gpus" not in given else []
    gpus = ranks if device is None else 0
    return RayLauncher(address, python=arguments.text("--python"), options=[*options, *arguments.rest], gpus=gpus)


def _read_batch(arguments: Arguments, scheduler: str) -> Launcher:
    """Raises: UsageError."""
    from meshbook.launchers.batch import BatchLauncher
    from meshbook.launchers.engines.batch_queue import SCHEDULERS

    if scheduler not in SCHEDULERS:
        got = f'{did_you_mean(scheduler, tuple(SCHEDULERS))} There is no "{scheduler}".' if scheduler else ""
        there = ", ".join(f"batch:{each}" for each in SCHEDULERS)
        raise arguments.grammar.refuse(f"batch needs a scheduler: {there}.{got}", "batch")
    return BatchLauncher(scheduler, python=arguments.text("--python"), options=arguments.rest)


def _read_manual(arguments: Arguments, address: str) -> Launcher:
    """Raises: UsageError."""
    from meshbook.launchers.manual import WITHIN_S, ManualLauncher

    _refuse_rest(arguments, "manual")
    return ManualLauncher(address, python=arguments.text("--python"), within_s=read_within(arguments) or WITHIN_S)


def read_within(arguments: Arguments) -> float | None:
    """Seconds that ``--within`` says, if it is given. Raises: UsageError."""
    text = arguments.text(WITHIN.name)
    return None if text is None else parse_duration(text, WITHIN.name)


def _refuse_rest(arguments: Arguments, engine: str) -> None:
    if rest := " ".join(arguments.rest):
        raise arguments.grammar.refuse(f'the engine {engine} has no options, but got "{rest}" after "--".')


def read_other_engine(arguments: Arguments, procs: ProcMesh) -> Launcher | None:
    """Who starts more hosts of a mesh; None where that is who started the others. Raises: UsageError."""
    if arguments.text("--on") is None:
        if arguments.text(PYTHON.name) is not None:
            raise arguments.grammar.refuse("--python is for hosts of another engine: name it by --on.", "--on")
        if arguments.rest:
            raise arguments.grammar.refuse("what follows -- is for another engine: name it by --on.", "--on")
        return None
    return read_engine(arguments, procs.device, lambda: len(procs) // len(procs.hosts))
