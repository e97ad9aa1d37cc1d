"""``%mesh spawn``: a mesh of processes, on hosts that an engine starts.

The options ``--on``, ``--python`` and ``--within`` are those of ``%mesh heal`` and ``%mesh grow`` too. A project may
keep lines of ``%mesh spawn`` under a name, as profiles, in either of two files:

meshbook.toml                        pyproject.toml
    [spawn]                              [tool.meshbook.spawn]
    gpu = "hosts=4 gpus=8 --on slurm"    gpu = "hosts=4 gpus=8 --on slurm"
"""

from __future__ import annotations

import itertools
import math
import sys
import time
import warnings
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

import msgspec

from meshbook.errors import UsageError
from meshbook.formatting import did_you_mean, format_sizes
from meshbook.launchers.base import Launcher
from meshbook.launchers.registry import ENGINES, Asked, count_hosts
from meshbook.launchers.registry import parse as parse_engine
from meshbook.mesh import states
from meshbook.mesh.driven import start_hosts, this_host
from meshbook.mesh.proc_mesh import ProcMesh
from meshbook.mesh.proc_view import arrange_ranks
from meshbook.sessions.folder import SavedLauncher
from meshbook.system.interfaces import WANTED, own_interfaces, wanted_interfaces
from meshbook_extension.cells.running import Jobs, interrupted
from meshbook_extension.commands import Command
from meshbook_extension.notebook.grammar import Arguments, Option, check_identifier, parse
from meshbook_extension.notebook.session import DEFAULT_NAME, Session
from meshbook_extension.notebook.targets import RANK
from meshbook_extension.notebook.time_limits import Limit, TimeLimits
from meshbook_extension.output.labels import count, format_seconds
from meshbook_extension.output.publisher import sink_for

HOSTS = "hosts"
"""The axis that counts machines; all others count processes on each."""

ON = Option(
    "--on",
    "who starts the hosts: this machine by itself, another one's daemon, an engine, or you",
    str,
    "|".join(engine.usage for engine in ENGINES.values()),
)
PYTHON = Option("--python", "the interpreter on hosts elsewhere", str, "PATH")
WITHIN = Option(
    "--within", "how long it may go without progress (2m), or hosts of manual take to come (30m)", float, "TIME"
)


def read_engine(arguments: Arguments, device: str | None, count_ranks: Callable[[], int]) -> Launcher:
    """Return the launcher that ``--on`` names. device: of the ranks. count_ranks: counts those of each host."""
    text = arguments.text("--on") or "local"
    asked = Asked(
        python=arguments.text(PYTHON.name),
        options=arguments.rest,
        within_s=arguments.number(WITHIN.name),
        device=device,
        count_ranks=count_ranks,
        torch=not arguments.flag("--no-torch"),
    )
    try:
        return parse_engine(text, asked)
    except UsageError as error:
        name = text.partition(":")[0]
        raise arguments.grammar.refuse(str(error), name if name in ENGINES else "ssh:") from None


def read_other_engine(arguments: Arguments, procs: ProcMesh) -> Launcher | None:
    """Return the launcher of more hosts of a mesh; None for that of the other hosts. Raises: UsageError."""
    if arguments.text("--on") is None:
        if arguments.text(PYTHON.name) is not None:
            raise arguments.grammar.refuse("--python is for hosts of another engine: name it by --on.", "--on")
        if arguments.rest:
            raise arguments.grammar.refuse("what follows -- is for another engine: name it by --on.", "--on")
        return None
    return read_engine(arguments, states.device_of(procs), lambda: len(procs) // len(procs.hosts))


if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

_FILES = {"meshbook.toml": (), "pyproject.toml": ("tool", "meshbook")}
"""The files of profiles, each with the path to our table in it."""


class Profiles(NamedTuple):
    """The profiles of one file."""

    path: Path | None
    """The file, None if there is none."""
    lines: Mapping[str, str]


def find_profiles(folder: Path) -> Profiles:
    """Return the profiles of the nearest file that has some, in ``folder`` or above it. Raises: UsageError."""
    for place in (folder, *folder.parents):
        for name, way in _FILES.items():
            table = _read(place / name)
            for key in (*way, "spawn"):
                table = table.get(key, {}) if isinstance(table, dict) else {}
            if not table:
                continue
            if isinstance(table, dict) and all(isinstance(line, str) for line in table.values()):
                return Profiles(place / name, table)
            raise UsageError(
                f"{place / name}: each profile below [spawn] is a line, as in\n"
                '  gpu-cluster = "hosts=4 gpus=8 --on ssh:nodeA,nodeB"'
            )
    return Profiles(None, {})


def with_profile(arguments: Arguments) -> Arguments:
    """Return the arguments with those of the profile that they name; those of the line itself count.

    Raises: UsageError.
    """
    if not arguments.profile:
        return arguments
    found = find_profiles(Path.cwd())
    line = found.lines.get(arguments.profile)
    if line is None:
        there = f"{found.path} has {', '.join(found.lines)}" if found.path else "No file here has any"
        near = did_you_mean(arguments.profile, found.lines)
        raise UsageError(
            f'there is no profile "{arguments.profile}".{near} {there}.\n'
            '  write it in meshbook.toml, here or above, below [spawn]: gpu-cluster = "hosts=2 gpus=4 --on ..."'
        )
    try:
        written = parse(arguments.grammar, line)
        if written.profile or written.words or written.wants_help:
            raise UsageError("a profile has axes, options, and what follows --")
    except UsageError as error:
        raise UsageError(f'profile "{arguments.profile}" of {found.path}: {error}') from None
    return replace(
        arguments,
        pairs={**written.pairs, **arguments.pairs},
        options={**written.options, **arguments.options},
        rest=arguments.rest or written.rest,
    )


def _read(path: Path) -> object:
    """Raises: UsageError."""
    try:
        return tomllib.loads(path.read_text())
    except (FileNotFoundError, NotADirectoryError):
        return {}
    except (OSError, ValueError) as error:
        raise UsageError(f"{path} cannot be read for profiles: {error}") from None


SHOWN_HOSTS = 4
"""The most hosts that are listed with their addresses."""


@Command(
    name="%mesh spawn",
    summary="Start a process per rank and form their process group.",
    profiles=True,
    words="[N]",
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
        Option("--idle-stop", "stop it when nothing has run on it for so long: 30m, 2h", float, "TIME"),
        Option("--max-hours", "stop it after so many hours", float, "N"),
        Option("--out", "bind the mesh, a ProcMesh, to this name in the notebook", str, "VAR"),
    ),
    rest="ENGINE OPTIONS",
    examples=(
        "%mesh spawn gpus=4",
        "%mesh spawn 4",
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
Axes are yours to name, and N alone is gpus=N; hosts counts machines, and the last axis varies fastest. Each rank gets
its own device.
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
def spawn(session: Session, arguments: Arguments) -> ProcMesh:
    arguments = with_profile(_with_count(arguments))
    name = arguments.text("--name") or DEFAULT_NAME
    out = arguments.text("--out")
    check_identifier(name, "--name")

    def count_ranks() -> int:
        return math.prod(size for axis, size in _read_sizes(arguments).items() if axis != HOSTS)

    launcher = read_engine(arguments, arguments.text("--device"), count_ranks)
    sizes = _read_sizes(arguments)
    hosts = _count_hosts(arguments, launcher, sizes.pop(HOSTS, None))
    env = _read_variables(arguments)
    interface = arguments.text("--interface")
    if interface is not None and launcher.shares_environment and not wanted_interfaces(interface):
        there = ", ".join(map(str, own_interfaces())) or "none"
        raise UsageError(f"--interface: this machine has no {interface}; it has {there}.")
    limit = _read_limit(arguments)
    preload = tuple(filter(None, (arguments.text("--preload") or "").split(",")))
    all_sizes = {**({HOSTS: hosts} if hosts is not None else {}), **sizes}
    launchers = tuple(launcher.for_host(index).saved for index in range(hosts or 1))
    if _has_returned(session, name, all_sizes, launchers, arguments):
        return session.meshes[name]
    session.check_name_is_free(name)
    began = time.monotonic()
    torch = not arguments.flag("--no-torch")
    grouped = torch and not arguments.flag("--no-group")
    try:
        with warnings.catch_warnings(record=True) as told:
            place = this_host() if hosts is None else start_hosts({HOSTS: hosts}, launcher)
            procs = place.spawn_procs(
                sizes,
                name=name,
                device=arguments.text("--device"),
                preload=preload,
                torch=torch,
                group=grouped,
                owns_hosts=hosts is not None,
                env=env,
                cwd=arguments.text("--cwd"),
                within_s=arguments.number(WITHIN.name),
            )
    except KeyboardInterrupt:
        raise interrupted("the mesh was not spawned; what had started of it is stopped") from None
    before = session.current
    session.add(procs)
    session.part(TimeLimits).add(procs, limit, sink_for(session.shell), session.publisher)
    if out is not None:
        session.bind(out, procs)
    instead = f'; current in place of "{before}"' if before not in (None, name) else ""
    print(f"{_describe_spawned(procs, time.monotonic() - began, grouped=grouped)}{instead}")
    if grouped and not launcher.shares_environment and (ways := states.addresses(procs)):
        named = [f"{host} {way}" for host, way in ways]
        more = [f"and {len(named) - SHOWN_HOSTS} more"] if len(named) > SHOWN_HOSTS else []
        print(f"  hosts reach each other at {', '.join([*named[:SHOWN_HOSTS], *more])}")
    for warning in told:
        print(f"  {warning.message}")
    return procs


def _has_returned(
    session: Session, name: str, sizes: dict[str, int], launchers: tuple[SavedLauncher, ...], arguments: Arguments
) -> bool:
    """Whether the mesh that is asked for is there from before the kernel was restarted: a notebook that is run again
    from its top goes on with it."""
    procs = session.meshes.get(name)
    if name not in session.returned or procs is None or not procs.alive or procs.base().sizes != sizes or procs.lost:
        return False
    if arguments.text("--device") not in (None, states.device_of(procs)) or any(
        job.mesh == name for job in session.part(Jobs).running()
    ):
        return False
    asked = launchers, _read_variables(arguments), arguments.text("--cwd") or ""
    launched = tuple(saved.asked for saved in states.launchers_of(procs.base()))
    if asked != (launched, *states.asked_for(procs)):
        return False
    session.add(procs.base())
    limits, asked_limit = session.part(TimeLimits), _read_limit(arguments)
    began = limits.of(procs).began or asked_limit.began
    limits.add(procs, msgspec.structs.replace(asked_limit, began=began), sink_for(session.shell), session.publisher)
    if (out := arguments.text("--out")) is not None:
        session.bind(out, procs.base())
    print(
        f'mesh "{name}": {format_sizes(sizes)}, {states.device_of(procs)}; '
        "here from before the restart, with its state\n"
        f"  afresh: %mesh stop {name}, then spawn again"
    )
    return True


def _with_count(arguments: Arguments) -> Arguments:
    """Read ``%mesh spawn 4`` as ``%mesh spawn gpus=4``. Raises: UsageError."""
    if not arguments.words:
        return arguments
    (word,) = arguments.words
    if not word.isdigit():
        raise arguments.grammar.refuse(f'"{word}" has no size; write it as {word}=4.')
    if arguments.pairs.keys() - {HOSTS}:
        raise arguments.grammar.refuse(f"name the axis of the {word} ranks, too; write it as gpus={word}.")
    return replace(arguments, words=(), pairs={**arguments.pairs, "gpus": word})


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


def _count_hosts(arguments: Arguments, launcher: Launcher, count: int | None) -> int | None:
    try:
        return count_hosts(launcher, count)
    except UsageError as error:
        raise arguments.grammar.refuse(str(error), launcher.name) from None


def _read_variables(arguments: Arguments) -> dict[str, str]:
    """Return the variables of ``--env`` and ``--interface``. Raises: UsageError."""
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


def _read_limit(arguments: Arguments) -> Limit:
    """Return the limit of ``--idle-stop`` and ``--max-hours``. Raises: UsageError."""
    hours = arguments.number("--max-hours")
    if hours == 0:
        raise arguments.grammar.refuse("--max-hours 0 is no time at all.")
    return Limit(arguments.number("--idle-stop") or 0.0, (hours or 0.0) * 3600, time.time())


def give_procs(session: Session, sizes: dict[str, int]) -> ProcMesh:
    """Return the processes of ``Mesh(shape=...)``.

    They are those of the current mesh if it has as many ranks, else of one with these axes, so that a cell that is run
    again finds its hosts; else new ones, that are listed.
    """
    found = next((name for name in (session.current, *session.meshes) if _has_ranks(session, name, sizes)), None)
    if found is not None:
        procs = session.meshes[found]
        print(f'on mesh "{found}" ({format_sizes(procs.sizes)})')
        return procs if procs.sizes == sizes else arrange_ranks(procs, sizes, procs.ranks)
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
    if procs is None or not procs.alive or not states.is_grouped(procs):
        return False
    return procs.sizes == sizes or (name == session.current and len(procs) == math.prod(sizes.values()))


def _describe_spawned(procs: ProcMesh, seconds: float, *, grouped: bool) -> str:
    group = ("nccl" if states.device_of(procs) == "cuda" else "gloo") if grouped else "no process group"
    return (
        f'mesh "{procs.name}": {format_sizes(procs.sizes)}, {states.device_of(procs)}, {group}; '
        f"ready in {format_seconds(seconds)} ({count(len(procs), 'rank')} on {count(len(procs.hosts), 'host')})"
    )
