"""The meshes of a notebook: spawn, list, use, stop."""

from __future__ import annotations

import itertools
import math
import time
import warnings
from typing import TYPE_CHECKING

from msgspec.structs import replace

from meshbook.errors import UsageError
from meshbook.formatting import format_sizes
from meshbook.launchers.engines.job_lists import job_lists
from meshbook.launchers.registry import ENGINES
from meshbook.system.interfaces import WANTED, own_interfaces, wanted_interfaces
from meshbook_extension.cells.running import Jobs, interrupted
from meshbook_extension.commands import Command
from meshbook_extension.commands.attach import describe_age, describe_others
from meshbook_extension.notebook.engines import HOSTS, ON, PYTHON, WITHIN, read_engine, read_within
from meshbook_extension.notebook.grammar import Arguments, Option
from meshbook_extension.notebook.profiles import with_profile
from meshbook_extension.notebook.session import DEFAULT_NAME, Session, check_identifier
from meshbook_extension.notebook.targets import RANK
from meshbook_extension.notebook.time_limits import Limit, TimeLimits
from meshbook_extension.output.labels import count, format_seconds, parse_duration
from meshbook_extension.output.publisher import sink_for

if TYPE_CHECKING:
    from meshbook.launchers.base import Launcher
    from meshbook.mesh.host_mesh import HostMesh
    from meshbook.mesh.proc_mesh import ProcMesh
    from meshbook.sessions.folder import SavedLauncher


SHOWN_HOSTS = 4
"""So many are listed with their addresses."""


@Command(
    name="%mesh spawn",
    summary="Start a process per rank and form their process group.",
    profiles=True,
    pairs="AXIS=N [AXIS=N ...]",
    options=(
        ON,
        Option("--name", f'what the mesh is called ("{DEFAULT_NAME}")', str, "N"),
        Option("--device", "by default cuda where there is a device for each rank", str, choices=("cpu", "cuda")),
        Option("--preload", "modules to import once, before the ranks are forked", str, "MOD,.."),
        Option("--no-group", "form no process group"),
        Option("--no-torch", "ranks without torch, there sooner and lighter; no process group either"),
        PYTHON,
        WITHIN,
        Option("--env", "more of an environment for the ranks", str, "NAME=VALUE,.."),
        Option("--interface", "by which hosts reach each other, or its network: eth1, 10.0.0.0/8", str, "NAME"),
        Option("--cwd", "the folder of the ranks, from / or ~", str, "PATH"),
        Option("--idle-stop", "stop it when nothing has run on it for so long: 30m, 2h", str, "TIME"),
        Option("--max-hours", "stop it after so many hours", float, "N"),
        Option("--out", "bind the mesh, a ProcMesh, to this name in the notebook", str, "VAR"),
    ),
    rest="ENGINE OPTIONS",
    examples=(
        "%mesh spawn gpus=4",
        "%mesh spawn hosts=2 gpus=4 --on local",
        "%mesh spawn dp=2 tp=2 --name trainers --device cpu",
        "%mesh spawn gpus=8 --preload transformers,datasets",
        "%mesh spawn gpus=4 --out procs",
        "%mesh spawn gpus=4 --no-group",
        "%mesh spawn gpus=8 --on ssh:nodeA,nodeB",
        "%mesh spawn gpus=8 --on ssh:nodeA --python ~/env/bin/python --cwd ~/project -- -p 2222",
        "%mesh spawn hosts=4 gpus=8 --on slurm -- --partition gpu --time 1:00:00",
        "%mesh spawn hosts=4 gpus=8 --on k8s -- --image registry/meshbook:1 --namespace ml --gpus 8",
        "%mesh spawn hosts=3 gpus=2 --on ray:head:6379",
        "%mesh spawn hosts=4 gpus=8 --on mpi -- --hostfile hosts",
        "%mesh spawn hosts=4 gpus=8 --on batch:pbs -- --queue gpu --walltime 4:00:00",
        "%mesh spawn hosts=2 gpus=8 --on manual --within 1h",
        "%mesh spawn gpus=4 --env NCCL_DEBUG=INFO,OMP_NUM_THREADS=4",
        "%mesh spawn @gpu-cluster gpus=4",
    ),
    notes="""
Axes are yours to name; hosts counts machines, and the last axis varies fastest. Each rank gets its own device.
Hosts of ssh are named as for ssh, by your own config; what follows -- goes to ssh. Agents there speak through its
connection, so no port has to be reachable, and end with it.
Hosts of slurm are the nodes of an allocation: that of the notebook, else one of its own, for which what follows -- goes
to salloc. Agents there dial the notebook's machine.
Hosts of k8s are pods of a Kubernetes cluster: the notebook's own, or that of the kubeconfig. What follows -- is their
image, which has meshbook in it, and what each gets: --gpus N, --cpu N, --memory 64Gi, --namespace N, --template FILE.
Hosts of ray are nodes of a Ray cluster, with a GPU for each rank where it has them: that of this machine, or the one at
ADDRESS. What follows -- is what each host asks for: --num-cpus N, --num-gpus N, --resources JSON.
Hosts of mpi are those that mpirun knows of, by its options, which follow --, or by the job that the notebook is in.
Hosts of a batch scheduler (pbs, torque, lsf, sge, condor, or slurm by sbatch) are jobs, one each; what follows -- is
theirs, above all --walltime H:MM:SS.
Hosts of manual are where you run the command that is shown, with a ticket that is good for so many hosts and so long.
@PROFILE is a line of meshbook.toml, or of [tool.meshbook] in pyproject.toml, here or above; what is typed counts.""",
)
def spawn(session: Session, arguments: Arguments) -> None:
    """Start a mesh and make it the current one."""
    arguments = with_profile(arguments)
    name = arguments.text("--name") or DEFAULT_NAME
    out = arguments.text("--out")
    check_identifier(name, "--name")
    if out is not None:
        check_identifier(out, "--out")
    launcher = read_engine(arguments, arguments.text("--device"), lambda: _count_ranks(arguments))
    sizes = _read_sizes(arguments)
    hosts = _count_hosts(arguments, launcher, sizes.pop(HOSTS, None))
    env = _read_variables(arguments)
    _check_interface(arguments.text("--interface"), launcher)
    limit, within_s = _read_limit(arguments), read_within(arguments)
    preload = tuple(filter(None, (arguments.text("--preload") or "").split(",")))
    all_sizes = {**({HOSTS: hosts} if hosts is not None else {}), **sizes}
    launchers = tuple(launcher.for_host(index).saved for index in range(hosts or 1))
    if _has_returned(session, name, all_sizes, launchers, arguments):
        return
    session.check_name_is_free(name)
    began = time.monotonic()
    torch = not arguments.flag("--no-torch")
    grouped = torch and not arguments.flag("--no-group")
    try:
        with warnings.catch_warnings(record=True) as told:
            procs = _hosts(launcher, hosts).spawn_procs(
                sizes,
                name=name,
                device=arguments.text("--device"),
                preload=preload,
                torch=torch,
                group=grouped,
                owns_hosts=hosts is not None,
                env=env,
                cwd=arguments.text("--cwd"),
                within_s=within_s,
            )
    except KeyboardInterrupt:
        raise interrupted("the mesh was not spawned; what had started of it is stopped") from None
    session.add(procs)
    session.part(TimeLimits).add(procs, limit, sink_for(session.shell), session.publisher)
    if out is not None:
        session.bind(out, procs)
    print(_describe_spawned(procs, time.monotonic() - began, grouped=grouped))
    if grouped and not launcher.shares_environment and (ways := procs.ways()):
        print(f"  hosts reach each other at {_shortened([f'{host} {way}' for host, way in ways])}")
    for warning in told:
        print(f"  {warning.message}")


def _has_returned(
    session: Session, name: str, sizes: dict[str, int], launchers: tuple[SavedLauncher, ...], arguments: Arguments
) -> bool:
    """Whether the mesh that is asked for is there from before the kernel was restarted: a notebook that is run again
    from its top goes on with it."""
    procs = session.meshes.get(name)
    if name not in session.returned or procs is None or not procs.alive or procs.base().sizes != sizes or procs.lost:
        return False
    if arguments.text("--device") not in (None, procs.device) or any(
        job.mesh == name for job in session.part(Jobs).running()
    ):
        return False
    asked = launchers, _read_variables(arguments), arguments.text("--cwd") or ""
    launched = tuple(saved.asked for saved in procs.base().launchers)
    if asked != (launched, procs.env, procs.cwd):
        return False
    session.add(procs.base())
    limits, asked_limit = session.part(TimeLimits), _read_limit(arguments)
    began = limits.of(procs).began or asked_limit.began
    limits.add(procs, replace(asked_limit, began=began), sink_for(session.shell), session.publisher)
    if (out := arguments.text("--out")) is not None:
        session.bind(out, procs.base())
    print(
        f'mesh "{name}": {format_sizes(sizes)}, {procs.device}; here from before the restart, with its state\n'
        f"  afresh: %mesh stop {name}, then spawn again"
    )
    return True


def _read_sizes(arguments: Arguments) -> dict[str, int]:
    if not arguments.pairs:
        raise arguments.grammar.refuse("say how many ranks, along an axis that you name.")
    sizes = {}
    for axis, text in arguments.pairs.items():
        if axis == RANK:
            raise arguments.grammar.refuse(f'"{RANK}" means the number of a rank everywhere; name the axis otherwise.')
        if not text.isdigit() or int(text) < 1:
            raise arguments.grammar.refuse(f"{axis}={text}: the size of an axis is a whole number of at least 1.")
        sizes[axis] = int(text)
    return sizes


def _count_ranks(arguments: Arguments) -> int:
    """On each host."""
    return math.prod(size for axis, size in _read_sizes(arguments).items() if axis != HOSTS)


def _count_hosts(arguments: Arguments, launcher: Launcher, count: int | None) -> int | None:
    """How many hosts of its own the mesh has; None where it is on this one. Raises: UsageError."""
    named = len(launcher.named_hosts)
    if named and count not in (None, named):
        raise arguments.grammar.refuse(f"{HOSTS}={count}, but --on names {named}; leave {HOSTS} out.", launcher.name)
    if count is None and (counted := ENGINES[launcher.name].counted):
        raise arguments.grammar.refuse(f"say how many {counted}: {HOSTS}=N.", launcher.name)
    return named or count


def _read_variables(arguments: Arguments) -> dict[str, str]:
    """What ``--env`` and ``--interface`` say. Raises: UsageError."""
    variables = {}
    text = arguments.text("--env")
    for part in [] if text is None else text.split(","):
        name, equals, value = part.partition("=")
        if not name or not equals:
            raise arguments.grammar.refuse(
                f'--env takes NAME=VALUE, with commas between several; not "{part}".', "--env"
            )
        variables[name] = value
    if (interface := arguments.text("--interface")) is not None:
        variables[WANTED] = interface
    return variables


def _check_interface(wanted: str | None, launcher: Launcher) -> None:
    """Raises: UsageError for one that this machine does not have; hosts elsewhere tell of their own."""
    if wanted is not None and launcher.shares_environment and not wanted_interfaces(wanted):
        there = ", ".join(map(str, own_interfaces())) or "none"
        raise UsageError(f"--interface: this machine has no {wanted}; it has {there}.")


def _read_limit(arguments: Arguments) -> Limit:
    """What ``--idle-stop`` and ``--max-hours`` say. Raises: UsageError."""
    idle, hours = arguments.text("--idle-stop"), arguments.number("--max-hours")
    if hours == 0:
        raise arguments.grammar.refuse("--max-hours 0 is no time at all.")
    idle_s = 0.0 if idle is None else parse_duration(idle, "--idle-stop")
    return Limit(idle_s, (hours or 0.0) * 3600, time.time())


def _shortened(parts: list[str]) -> str:
    return ", ".join(
        parts if len(parts) <= SHOWN_HOSTS else [*parts[:SHOWN_HOSTS], f"and {len(parts) - SHOWN_HOSTS} more"]
    )


def _hosts(launcher: Launcher, count: int | None) -> HostMesh:
    from meshbook.mesh.driven import start_hosts, this_host

    return this_host() if count is None else start_hosts({HOSTS: count}, launcher)


def give_procs(session: Session, sizes: dict[str, int]) -> ProcMesh:
    """The processes of ``Mesh(shape=...)``, which is told where they are.

    They are those of the current mesh if it has as many ranks, else of one with these axes, so that a cell that is run
    again finds what it has made; else new ones, that are listed.
    """
    from meshbook.mesh.driven import this_host

    found = next((name for name in (session.current, *session.meshes) if _has_ranks(session, name, sizes)), None)
    if found is not None:
        procs = session.meshes[found]
        print(f'on mesh "{found}" ({format_sizes(procs.sizes)})')
        return procs if procs.sizes == sizes else procs.arrange(sizes, procs.ranks)
    names = itertools.chain([DEFAULT_NAME], (f"{DEFAULT_NAME}{number}" for number in itertools.count(2)))
    name = next(name for name in names if name not in session.meshes or not session.meshes[name].alive)
    before = session.current
    began = time.monotonic()
    procs = this_host().spawn_procs(sizes, name=name)
    session.add(procs)
    print(_describe_spawned(procs, time.monotonic() - began, grouped=True))
    if before is not None and before in session.meshes and session.meshes[before].alive:
        session.current = before
        print(f'  cells go to mesh "{before}" as before; make it current: %mesh use {name}')
    return procs


def _has_ranks(session: Session, name: str | None, sizes: dict[str, int]) -> bool:
    procs = session.meshes.get(name or "")
    if procs is None or not procs.alive or not procs.is_grouped:
        return False
    return procs.sizes == sizes or (name == session.current and len(procs) == math.prod(sizes.values()))


def _describe_spawned(procs: ProcMesh, seconds: float, *, grouped: bool) -> str:
    group = ("nccl" if procs.device == "cuda" else "gloo") if grouped else "no process group"
    return (
        f'mesh "{procs.name}": {format_sizes(procs.sizes)}, {procs.device}, {group}; '
        f"ready in {format_seconds(seconds)} ({count(len(procs), 'rank')} on {count(len(procs.hosts), 'host')})"
    )


@Command(
    name="%mesh list",
    summary="All meshes and named slices; what other kernels have, what waits to be attached, and jobs of engines.",
    examples=("%mesh list",),
)
def list_meshes(session: Session, arguments: Arguments) -> None:
    """One line per mesh, its slices below it; then what other kernels have."""
    others = describe_others()
    first = next(others, None) if not session.meshes else None
    if not session.meshes and first is None:
        print("no mesh yet. Start one: %mesh spawn gpus=4")
    for name, procs in session.meshes.items():
        mark = "*" if name == session.current else " "
        state = f"{count(len(procs), 'rank')}, {describe_age(procs.saved)}" if procs.alive else "stopped"
        print(f"{mark} {name}: {format_sizes(procs.sizes)}, {procs.device}, {state}")
        for slice_name, named in session.slices.items():
            if named.mesh == name:
                print(f"    {slice_name}: {format_sizes(named.view.sizes)}")
    for number, line in enumerate(itertools.chain([] if first is None else [first], others)):
        print(line if number else f"elsewhere:\n{line}", flush=True)
    for number, line in enumerate(job_lists()):
        print(f"  {line}" if number else f"jobs, as their engines have them:\n  {line}", flush=True)


@Command(
    name="%mesh use",
    names="meshes",
    summary="Make another mesh the current one; a ProcMesh of the notebook can be adopted by its name.",
    words="NAME",
    options=(Option("--out", "bind the mesh, a ProcMesh, to this name in the notebook", str, "VAR"),),
    examples=("%mesh use trainers", "%mesh use main --out procs"),
)
def use(session: Session, arguments: Arguments) -> None:
    """Make another mesh the current one."""
    from meshbook.mesh.proc_mesh import ProcMesh

    (name,) = arguments.words
    out = arguments.text("--out")
    value = session.shell.user_ns.get(name)
    if name not in session.meshes and isinstance(value, ProcMesh):
        session.check_name_is_free(value.name)
        session.add(value)
    procs = session.mesh(name if name in session.meshes else None if isinstance(value, ProcMesh) else name)
    session.current = procs.name
    if out is not None:
        session.bind(check_identifier(out, "--out"), procs)
    print(f'mesh "{procs.name}" is current: {format_sizes(procs.sizes)}')


@Command(
    name="%mesh stop",
    names="meshes",
    summary="End the processes of a mesh: the current one, the one named, or all.",
    words="[NAME]",
    options=(Option("--all", "every mesh"),),
    examples=("%mesh stop", "%mesh stop trainers", "%mesh stop --all"),
)
def stop(session: Session, arguments: Arguments) -> None:
    """Stop meshes and say which one is current then."""
    if arguments.flag("--all"):
        if arguments.words:
            raise UsageError("either a name or --all.\n  for example: %mesh stop --all")
        names = list(session.meshes)
    else:
        names = list(arguments.words) or [session.current or session.mesh().name]
    if not names:
        print("no mesh is running")
    for name in names:
        if name not in session.meshes:
            session.mesh(name)  # says which there are
        session.meshes[name].stop()
        session.forget(name)
        print(f'mesh "{name}" stopped')
    if names and session.current:
        print(f'mesh "{session.current}" is current now')
