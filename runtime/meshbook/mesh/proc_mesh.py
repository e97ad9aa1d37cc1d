"""ProcMesh: one process per point, arranged by named axes. What users hold, slice and call."""

from __future__ import annotations

import time
import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias, TypeVar

from meshbook.actor.actor_mesh import spawn_actors
from meshbook.actor.errors import ProcsNotStartedError, ProcsStoppedError
from meshbook.actor.listing import ActorState
from meshbook.actor.proc_ref import find_procs
from meshbook.actor.router import TActor, Values, router_for
from meshbook.actor.supervision import MeshFailure
from meshbook.calls.call import CallFuture, OpenCall
from meshbook.calls.cell_run import CellRun
from meshbook.calls.interrupt import interrupt
from meshbook.calls.output import OutputListener, OutputTarget
from meshbook.calls.rank_state import State, StatusAnswer, Unresponsive
from meshbook.calls.request import CallRequest
from meshbook.calls.stopped import StoppedRanks
from meshbook.concurrency.future import Future, MappedFuture, join_futures
from meshbook.controller.controller import Controller
from meshbook.controller.host_state import HostState
from meshbook.controller.logs import LogFollower, read_logs
from meshbook.controller.mesh_state import MeshState, stale_view
from meshbook.controller.queries import ask_rank, look
from meshbook.controller.stacks import StackQuestion
from meshbook.errors import (
    CallInterrupted,
    LayoutError,
    MeshError,
    RankDeath,
    SerializationError,
    UsageError,
    WorkerLost,
)
from meshbook.formatting import format_sizes
from meshbook.groups.absent import WITHOUT_TORCH
from meshbook.launchers.base import Launcher
from meshbook.lifecycle import MeshPhase
from meshbook.mesh import partition
from meshbook.mesh.host_versions import ways_of
from meshbook.mesh.log_streaming import LogStreaming
from meshbook.mesh.proc_names import MonarchNames
from meshbook.mesh.repair import ROUNDS, Note, Repair, Repaired
from meshbook.mesh.resize import Change, Elastic
from meshbook.sessions.folder import SavedLauncher, SavedMesh
from meshbook.shape.members import Choice, Extent, Members, Point, Region, arrange
from meshbook.shape.value_mesh import ValueMesh
from meshbook.shell.postmortem_memory import Freed
from meshbook.source.cells import text_only_here
from meshbook.stacks.mesh_stacks import MeshStacks
from meshbook.system.gpu import GpuUse
from meshbook.values.pickling import dumps
from meshbook.wire.messages import AtPrompt
from meshbook.workspace.local_modules import find_modules
from meshbook.workspace.synced_modules import Synced, take_modules

if TYPE_CHECKING:
    from meshbook.tensors.handles.mesh_tensor import MeshTensor

T = TypeVar("T")

STOP_GRACE_S = 1.0
"""Busy workers have this long to end when a mesh is stopped."""


_Methods: TypeAlias = "list[weakref.WeakMethod[Callable[[], object]]]"


def _living(methods: _Methods) -> _Methods:
    return [method for method in methods if method() is not None]


def _call_living(methods: _Methods) -> None:
    for each in methods:
        if (method := each()) is not None:
            method()


class RankStatus(NamedTuple):
    """One rank, as `ProcMesh.status` tells it."""

    rank: int
    point: Point
    host: str
    pid: int
    device: str
    state: State
    """``idle``, ``busy``, ``pdb`` (at a prompt), ``stopped`` (by SIGSTOP, say), ``silent`` (its control thread did not
    answer) or ``dead``."""
    busy_s: float
    where: str
    """What a busy rank is doing; where one in pdb stands; why a dead one ended, or a silent one does not answer."""
    rss_bytes: int
    moved_bytes: int = 0
    """Payload that the rank's process groups have moved since it began (`meshbook.groups.group`)."""
    gpu: GpuUse | None = None
    kept_bytes: int = 0
    """What the frames of its last exception hold, which are kept for a post-mortem; see `ProcMesh.free`."""
    in_collective: bool = False
    """Whether what it does is a collective, or another function of torch.distributed."""


class HostPart(NamedTuple):
    """Members of a mesh on one host."""

    name: str
    is_here: bool
    """Whether it is the machine that we run on."""
    ranks: tuple[int, ...]


class ProcMesh(MonarchNames):
    """A mesh of worker processes, or a view of some of them; views share the processes and cost nothing.

    Calls return a `Future`; ``.get()`` waits. Each call runs once on every member, in the order in which it was made.
    """

    def __init__(
        self, controller: Controller, mesh: MeshState, members: Members | None = None, generation: int | None = None
    ) -> None:
        """members: all by default. generation: in which they have their numbers; that of now by default."""
        super().__init__(Region.of(mesh.extent) if members is None else members)
        self._controller, self._mesh = controller, mesh
        self._generation = mesh.generation if generation is None else generation

    @property
    def name(self) -> str:
        return self._mesh.name

    @property
    def id(self) -> int:
        """Names the mesh in its session, also for later controllers; views of a mesh have the same."""
        return self._mesh.id

    @property
    def session(self) -> str:
        """The session that it belongs to: what another process attaches."""
        return self._controller.folder.id

    def base(self) -> ProcMesh:
        """The whole mesh that this is a view of."""
        return ProcMesh(self._controller, self._mesh)

    def as_on_ranks(self) -> ProcMesh:
        """The whole mesh with the axes that `mesh` and `point` have on the ranks; see `set_axes`."""
        return ProcMesh(self._controller, self._mesh, Region.of(self._mesh.axes))

    def arrange(self, sizes: Mapping[str, int], ranks: Sequence[int]) -> ProcMesh:
        """A view of ``ranks`` (distinct base ranks, in C order) laid out along axes of these sizes."""
        return self._part(arrange(Extent.of(sizes), ranks))

    def _part(self, members: Members) -> ProcMesh:
        return ProcMesh(self._controller, self._mesh, members, self._generation)

    def _present(self) -> ProcMesh:
        """Wait until the processes are there. Raises: LayoutError if ranks have other numbers than in this view."""
        self._mesh.await_arrival()
        if self._generation != self._mesh.generation:
            raise stale_view(self._mesh)
        return self

    # ---- calls --------------------------------------------------------------------------------------------------

    def run(self, code: str, *, forbid_collectives: bool = False) -> Future[Values]:
        """Run ``code`` as an IPython cell on every member; the values are those of its last expression.

        forbid_collectives: a collective raises rather than wait for ranks that do not run this cell.
        """
        return self._call("run_cell", (code, None, 0, forbid_collectives), what="the cell", fail_fast=False)

    def start_cell(
        self,
        code: str,
        *,
        on_output: OutputListener,
        cell_number: int | None = None,
        line_offset: int = 0,
        forbid_collectives: bool = False,
        debug_name: str = "",
        profile: str = "",
    ) -> CellRun:
        """Run a notebook's cell; ``on_output`` gets everything that it prints and shows, also later.

        cell_number, line_offset: how tracebacks name the cell, and how many of its lines stand above ``code``.
        forbid_collectives: a collective raises rather than wait for ranks that do not run this cell.
        debug_name: what a debugger calls the cell's file.
        profile: have torch.profiler record it under this name, to be collected by `meshbook.mesh.profiles`.
        """
        self._present()
        if self._mesh.before_calls:
            _call_living(self._mesh.before_calls)
        run = CellRun(self.new_output_id(), on_output)
        what = f"cell {cell_number}" if cell_number else "the cell"
        arguments = (code, cell_number, line_offset, forbid_collectives, debug_name, profile)
        pickled = dumps((arguments, {}), what="the cell")
        request = CallRequest("run_cell", self._members, pickled, what, fail_fast=False, on_reply=run.on_reply)
        run.attach(self._controller.call(self._mesh, request, OutputTarget(run.id, on_output)))
        return run

    def execute(self, function: Callable[..., T], *args: object, **kwargs: object) -> Future[ValueMesh[T]]:
        """Call ``function(*args, **kwargs)`` on every member.

        Functions and classes of the notebook travel by value, as they are now. Raises: SerializationError.
        """
        name = getattr(function, "__name__", "a function")
        code = getattr(function, "__code__", None)
        if code is not None and code.co_filename not in self._mesh.sources:
            self._tell_source(code.co_filename)
        try:
            return self._call("invoke", (function, *args), kwargs, what=name)
        except SerializationError:  # once more, to say which argument it was
            roots = {name: function, **{f"argument {index}": value for index, value in enumerate(args, 1)}, **kwargs}
            return self._call("invoke", (function, *args), kwargs, what=name, roots=roots)

    def _tell_source(self, file_name: str) -> None:
        """Have all ranks know the text of a file, once, if only this process has it."""
        self._mesh.sources.add(file_name)
        if text := text_only_here(file_name):
            everyone = range(self._mesh.extent.nelements)
            self._controller.questions.tell(self._mesh, everyone, ask_rank("learn_source", file_name, text))

    def execute_as(self, what: str, function: Callable[..., T], *args: object) -> Future[ValueMesh[T]]:
        """As `execute`, of a function that ranks can import, with all failures in the error, not the first alone.

        what: the call, as notes, errors and status name it.
        """
        return self._call("invoke", (function, *args), what=what, fail_fast=False)

    def sync_workspace(
        self, workspace: str | Path = ".", conda: bool = False, auto_reload: bool = False
    ) -> Future[ValueMesh[dict[str, Synced]]]:
        """Send the Python modules at a path to the members, which import them from memory and reload those in use.

        workspace: a module's file, a package, or a folder that has some. Values: what became of each module, by name.
        conda, auto_reload: Monarch's. What is in use is reloaded either way.
        Raises: UsageError, also where one does not parse, and for ``conda=True``: packages are installed there.
        """
        if conda:
            raise UsageError("conda=True: the packages of an environment are not sent; install them there, by pip.")
        found = find_modules(Path(workspace))
        for name, problem in found.broken.items():
            raise UsageError(f"{name} does not parse ({problem}); nothing was sent")
        return self.execute_as("sync_workspace", take_modules, found.modules)

    def evaluate(self, expression: str) -> Future[Values]:
        """The value of an expression in each member's namespace."""
        return self._call("pull", ([expression],), what=expression)

    def push(self, values: Mapping[str, object]) -> Future[ValueMesh[None]]:
        """Bind names on every member. Raises: SerializationError naming the part that cannot travel."""
        return self._call("push", (dict(values),), what="push", roots=values)

    def pull(self, name: str) -> Future[Values]:
        """Bring the value of ``name`` from every member."""
        return self.evaluate(name)

    def free(self) -> Future[ValueMesh[Freed]]:
        """Let go of the frames of each member's last exception, with their tensors, and of device caches.

        There is nothing to look at for a post-mortem after that.
        """
        return self._call("free", (), what="free")

    def scatter(self, name: str, value: object, axis: str | None = None, dim: int = 0) -> Future[list[ValueMesh[None]]]:
        """Bind ``name`` to one piece of ``value`` per index of ``axis``; members that share the index get the same.

        value: a tensor or array, cut along ``dim`` as by ``tensor_split``, or a sequence. axis: the mesh's only axis by
        default.
        """
        axis = self._one_axis(axis)
        pieces = partition.split(value, self.size(axis), dim)
        futures = [self.pick(**{axis: i}).push({name: piece}) for i, piece in enumerate(pieces)]
        return join_futures(futures)

    def gather(self, name: str, axis: str | None = None, dim: int = 0) -> Future[Any]:
        """Bring ``name`` from the members along ``axis`` (index 0 of all others) and join it along ``dim``."""
        axis = self._one_axis(axis)
        others: dict[str, Choice] = {label: 0 for label in self.sizes if label != axis}
        members = self.pick(**others)
        pieces = members._call("pull", ([name], list(members.ranks)), what=name)
        return MappedFuture(pieces, lambda values: partition.join(values.values(), dim))

    def broadcast(self, name: str, src: int = 0) -> Future[ValueMesh[None]]:
        """Bind ``name`` on every member to its value on base rank ``src``, by the process group.

        The group spans the whole mesh, so that is who takes part. Raises: RankError, LayoutError on a partial view.
        """
        if len(self) != self._mesh.extent.nelements:
            raise LayoutError("broadcast runs in the mesh's process group: call it on the whole mesh, not on a slice.")
        self._members.point(src)
        return self._call("broadcast", (name, src), what=f"broadcast of {name}")

    def set_axes(self) -> Future[ValueMesh[None]]:
        """Rebind ``mesh`` and ``point`` on the ranks to the axes of this view, which must cover the whole mesh."""
        if self.ranks != tuple(range(self._mesh.extent.nelements)):
            raise LayoutError("only a view of the whole mesh, in rank order, can become the ranks' axes.")
        self._mesh.axes = self.sizes
        return self._call("set_axes", (tuple(self.sizes), tuple(self.sizes.values())), what="the axes")

    def abort_groups(self, reason: str) -> None:
        """Free all ranks of the mesh that wait in collectives: they raise GroupAborted. Does not wait.

        The groups are formed again when the calls that run now have ended. reason: what the ranks' errors say.
        """
        self._controller.abort_groups(self._mesh, reason)

    def prove_group(self) -> Future[ValueMesh[None]]:
        """Prove the default process group with a collective, behind the calls that ranks run."""
        return self._call("prove_group", (), what="the proof of the process groups")

    def rebuild_groups(self) -> Future[ValueMesh[None]]:
        """Form the default process group of the whole mesh and prove it with a collective.

        Groups that are there are formed again, in place: DeviceMeshes, DTensors and modules made before work on.
        Raises: UsageError if the mesh has no torch.
        """
        if not self._mesh.recipe.torch:
            raise UsageError(WITHOUT_TORCH)
        self._mesh.await_arrival()
        return self._controller.form_groups(self._mesh)

    def prepare_group(self) -> Future[ValueMesh[None]]:
        """Set torchrun's variables on the ranks without forming a group: cells may then make their own."""
        return self._call("prepare_group", (self._controller.next_id(),), what="the ranks' variables")

    def ways(self) -> list[tuple[str, str]]:
        """Each host and the address at which others reach it for collectives: ``("nodeA", "10.0.0.5 (eth0)")``."""
        return ways_of(self._controller, self._mesh)

    # ---- repair -------------------------------------------------------------------------------------------------

    def heal(
        self,
        setup: Sequence[str] = (),
        *,
        force: bool = False,
        note: Note | None = None,
        launcher: Launcher | None = None,
    ) -> Repaired:
        """Start the ranks that ended again, with new agents where theirs are lost, and form the groups with all ranks.

        The others keep their state; the new ones have none. They run the cells ``setup``, alone.
        force: also a rank that ends again and again, and those of hosts that are suspect (`suspects`), which are given
        up. note: is told, once, what takes long.
        launcher: starts other hosts in the place of lost ones; by default these come back as they came.
        Raises: CrashLoopError, SpawnError, UsageError; KeyboardInterrupt, and then it can be healed again.
        """
        return self._repair((), setup, force=force, note=note, launcher=launcher)

    def respawn(
        self, ranks: int | Iterable[int], setup: Sequence[str] = (), *, force: bool = False, note: Note | None = None
    ) -> Repaired:
        """End ``ranks``, busy or not, and start them again in their places, as `heal` does with all that ended."""
        chosen = [ranks] if isinstance(ranks, int) else list(ranks)
        for rank in chosen:
            self._present().members.point(rank)
        return self._repair(chosen, setup, force=force, note=note)

    def _repair(
        self,
        ranks: Sequence[int],
        setup: Sequence[str],
        *,
        force: bool,
        note: Note | None,
        launcher: Launcher | None = None,
    ) -> Repaired:
        self._mesh.await_arrival()
        new: set[int] = set()
        for left in reversed(range(ROUNDS)):
            repaired = Repair(self._controller, self._mesh, self.base(), note, launcher).run(ranks, setup, force=force)
            new.update(repaired.ranks)
            try:
                _call_living(self._mesh.after_repairs)
                break
            except WorkerLost:
                if not left or not self._mesh.lost:
                    raise
                ranks, launcher = (), None  # another one has died meanwhile
        return repaired._replace(ranks=tuple(sorted(new)))

    def grow(self, launcher: Launcher | None = None, /, **more: int) -> ProcMesh:
        """Add indices at the ends of axes: ``grow(gpus=2)``; returns the whole mesh as it is then.

        Who is there keeps its process, its state, and its rank unless new ones come before it. New ranks have no state.
        Along an axis that counts hosts new hosts are started, if the mesh has hosts of its own: by ``launcher``, else
        as its first one was.
        Raises: UsageError while a cell runs, UnknownAxisError, DeviceError, SpawnError: then the mesh is as it was.
        """
        return self.change(grow=more, launcher=launcher).procs

    def shrink(self, **fewer: int) -> ProcMesh:
        """Remove indices of axes: ``shrink(gpus=1)``, those of dead ranks first, then from the end; see `grow`.

        Without an axis: go on without the dead ranks, along the axis that loses the fewest others.
        """
        return self.change(shrink=fewer).procs

    def change(
        self,
        *,
        grow: Mapping[str, int] | None = None,
        shrink: Mapping[str, int] | None = None,
        note: Note | None = None,
        launcher: Launcher | None = None,
    ) -> Change:
        """As `grow` or `shrink`, one of the two; says also which rank became which."""
        elastic = Elastic(self._controller, self._mesh, self._present(), note)
        return elastic.grow(grow, launcher) if grow is not None else elastic.shrink(shrink or {})

    def ask(self, endpoint: str, *args: object, timeout_s: float = 0.5) -> dict[int, object]:
        """Put a question to the members' control threads, which answer also while the ranks are busy or stuck.

        endpoint: one of `meshbook.worker.endpoints.QUERIES`. args and answers are plain data. Returns: what came in
        time; members that answer None are left out.
        """
        return self.ask_for(object, endpoint, *args, timeout_s=timeout_s)

    def ask_for(self, kind: type[T], endpoint: str, *args: object, timeout_s: float = 0.5) -> dict[int, T]:
        """The same, with answers as ``kind``."""
        ranks = self._present().members.ranks()
        return self._controller.questions.gather(self._mesh, ranks, ask_rank(endpoint, *args), kind, timeout_s)

    def ask_one(
        self, kind: type[T], endpoint: str, *args: object, ranks: Sequence[int], patience_s: float, timeout_s: float
    ) -> tuple[int, T | None] | None:
        """The same to the first of ``ranks`` that answers; see `meshbook.controller.queries.Questions.first`."""
        self._present()
        asked = ask_rank(endpoint, *args)
        return self._controller.questions.first(
            self._mesh, ranks, asked, kind, patience_s=patience_s, timeout_s=timeout_s
        )

    def _call(
        self,
        endpoint: str,
        args: tuple[object, ...],
        kwargs: Mapping[str, object] | None = None,
        *,
        what: str,
        roots: Mapping[str, object] | None = None,
        fail_fast: bool = True,
    ) -> CallFuture[Any]:
        if self._generation != self._mesh.generation:  # `_present`, on the path of every call
            raise stale_view(self._mesh)
        if self._mesh.before_calls:
            _call_living(self._mesh.before_calls)
        pickled = dumps((args, kwargs or {}), what=what, roots=roots)
        request = CallRequest(endpoint, self._members, pickled, what, fail_fast=fail_fast)
        return self._controller.call(self._mesh, request, self.output_target())

    def output_target(self) -> OutputTarget | None:
        """Where what a call prints goes that is made now; None: to our stdout."""
        shown_by, source = self._mesh.shown_by, self._controller.front_end.output_source
        if shown_by is not None and (target := shown_by.target()) is not None:
            return target
        return source(self) if source else None

    def show_calls_by(self, streaming: LogStreaming) -> None:
        """Have what calls to the mesh print, those of cells apart, shown so from now on."""
        self._mesh.shown_by = streaming

    def call_before_calls(self, method: Callable[[], object]) -> None:
        """Call a method before each call to these processes is sent, as long as its object lives; see `base`."""
        self._mesh.before_calls = [*_living(self._mesh.before_calls), weakref.WeakMethod(method)]

    def call_after_repairs(self, method: Callable[[], object]) -> None:
        """Call a method when ranks of these processes were started again, as long as its object lives."""
        self._mesh.after_repairs = [*_living(self._mesh.after_repairs), weakref.WeakMethod(method)]

    def activate(self) -> AbstractContextManager[None]:
        """While it lasts, tensors that begin here begin on each of these processes; see docs/tensors.md."""
        from meshbook.tensors.handles.local_view import activate

        return activate(self)

    def rank_tensor(self, dim: str | Sequence[str]) -> MeshTensor:
        """Each process's own index along an axis, as a tensor of the local view; along several as along one."""
        from meshbook.tensors.handles.local_view import rank_tensor

        return rank_tensor(self, dim)

    def rank_tensors(self) -> dict[str, MeshTensor]:
        """`rank_tensor` of each axis."""
        return {axis: self.rank_tensor(axis) for axis in self.sizes}

    def spawn(self, name: str, cls: type[TActor], /, *args: object, **kwargs: object) -> TActor:
        """Make an actor ``cls(*args, **kwargs)`` in every process; returns an `ActorMesh` at once.

        For type checkers it is a ``cls``, whose endpoints have the adverbs of `meshbook.actor.Endpoint`. A constructor
        that fails fails the first call. Raises: UsageError for what is no actor class, ArgumentsError,
        SerializationError.
        """
        if self._generation != self._mesh.generation:
            raise stale_view(self._mesh)
        if not (self.alive or self._mesh.detached):
            raise self._mesh.not_started or ProcsStoppedError(self.name)
        router = router_for(self.session)
        return spawn_actors(router, self.id, self.name, self._members, name, cls, args, kwargs, self._generation)

    def actors(self) -> list[ActorState]:
        """What the members' actors are doing, now; ordered by name, then by rank."""
        states = [state for told in self.ask_for(list[ActorState], "actors").values() for state in told]
        return sorted(states, key=lambda state: (state.name, state.mailbox, state.rank))

    def new_output_id(self) -> int:
        """A number for an `OutputTarget`."""
        return self._controller.next_id()

    def _one_axis(self, axis: str | None) -> str:
        if axis is not None:
            self._members.size(axis)
            return axis
        if len(self.sizes) != 1:
            raise LayoutError(
                f"this mesh has {format_sizes(self.sizes)}: say which axis, as in axis={next(iter(self.sizes), '')!r}."
            )
        return next(iter(self.sizes))

    @property
    def was_called(self) -> bool:
        """Whether somebody is told, by a call or by waiting, what has kept these processes from coming."""
        return self._mesh.arrival is not None and self._mesh.arrival.is_asked

    def remember_fault(self, failure: MeshFailure) -> None:
        """Nothing: processes that have not come fail every call."""

    # ---- life ---------------------------------------------------------------------------------------------------

    @property
    def alive(self) -> bool:
        """Whether the mesh has not been stopped."""
        return self._mesh.phase not in (MeshPhase.STOPPING, MeshPhase.STOPPED)

    @property
    def lost(self) -> tuple[int, ...]:
        """The members that have ended without being told to, in order."""
        return tuple(rank for rank in self.ranks if rank in self._mesh.lost)

    @property
    def deaths(self) -> tuple[RankDeath, ...]:
        """How these have ended, in order."""
        return tuple(death for rank in self.lost for death in self._mesh.lost[rank].deaths)

    @property
    def interrupted(self) -> tuple[int, ...]:
        """The members whose main thread runs, or has yet to run, a call that was interrupted, in order."""
        return self._waiting_in(lambda call: call.interrupts > 0 and not call.mailbox)

    @property
    def hosts(self) -> tuple[str, ...]:
        """Host names, in rank order."""
        return tuple(host.name for host in self._mesh.hosts)

    @property
    def launchers(self) -> tuple[SavedLauncher, ...]:
        """Who has started these hosts."""
        return tuple(host.launcher for host in self._mesh.hosts)

    @property
    def saved(self) -> SavedMesh:
        """What lists of meshes say of it; see `meshbook.sessions`."""
        return self._mesh.saved

    @property
    def env(self) -> dict[str, str]:
        """What was asked for in the environment of the members."""
        return dict(self._mesh.recipe.asked_environment)

    @property
    def cwd(self) -> str:
        """The folder that was asked for; empty for the one of the program, or of its host."""
        return self._mesh.recipe.asked_cwd

    @property
    def suspects(self) -> dict[str, str]:
        """The hosts of the mesh that are silent though they are not known to have ended, and since when.

        Their ranks answer again as soon as they do.
        """
        return {host.name: host.suspicion for host in self._mesh.hosts if host.suspicion}

    def by_host(self) -> list[HostPart]:
        """The members on each host, in rank order."""
        parts: dict[HostState, list[int]] = {}
        for rank in self.ranks:
            parts.setdefault(self._mesh.host_of(rank), []).append(rank)
        return [HostPart(host.name, host.shares_memory, tuple(ranks)) for host, ranks in parts.items()]

    @property
    def device(self) -> str:
        """The kind of device that the members have: ``cpu`` or ``cuda``; waits until they are there."""
        if self.alive:
            self._mesh.await_arrival()
        return self._device

    @property
    def _device(self) -> str:
        return next((worker.device.partition(":")[0] for worker in self._mesh.workers.values()), "cpu")

    def log_paths(self) -> dict[int, str]:
        """Where each member's log lies on its host."""
        return {rank: self._mesh.workers[rank].log_path for rank in self.ranks if rank in self._mesh.workers}

    def logs(self, lines: int = 20, *, containing: str = "") -> dict[int, str]:
        """The last lines that each member wrote, also of members that have ended; of silent hosts none.

        containing: only lines with this text, among the last 256 kB of each.
        """
        self._present()
        return read_logs(self._controller.questions, self._mesh, self._members, lines, containing)

    def follow_logs(self, lines: int = 20) -> LogFollower:
        """What members write from now on, and the last ``lines`` lines before it."""
        return LogFollower(self._controller.questions, self._mesh, self._present()._members, lines)

    def where(self) -> dict[int, str]:
        """What each member's main thread is doing, busy or not."""
        self._present()
        return self._controller.where(self._mesh.id, self._members.ranks())

    def stacks(self, *, all_threads: bool = False, native: bool = False, timeout_s: float = 3.0) -> MeshStacks:
        """The Python stacks of the members, busy, blocked or stopped; and in words who holds the others up.

        all_threads: not only the main thread. native: with the frames of native code, which py-spy reads.
        timeout_s: what ranks that cannot answer may take to be read from outside.
        """
        self._mesh.check_usable()
        question = StackQuestion(all_threads, native, timeout_s)
        return self._controller.stacks(self._mesh, self._present().members, question)

    def status(self) -> list[RankStatus]:
        """Ask each member for its state now."""
        self._mesh.check_usable()
        self._present()
        answers = look(self._controller.questions, self._mesh, self._members.ranks(), "status", StatusAnswer, 0.5)
        return [self._status_of(rank, answers[rank]) for rank in self._members.ranks()]

    def _status_of(self, rank: int, answer: StatusAnswer | Unresponsive) -> RankStatus:
        worker, lost = self._mesh.workers.get(rank), self._mesh.lost.get(rank)
        host, pid, device = (worker.host.name, worker.pid, worker.device) if worker else ("?", 0, "?")
        point = self._members.point(rank)
        if lost is not None:
            return RankStatus(rank, point, host, pid, device, "dead", 0.0, lost.cause, 0)
        if isinstance(answer, Unresponsive):
            return RankStatus(rank, point, host, pid, device, answer.state, 0.0, str(answer), 0)
        known = (answer.busy_s, answer.where, answer.rss_bytes, answer.moved_bytes, answer.gpu, answer.kept_bytes)
        return RankStatus(rank, point, host, pid, device, answer.state, *known, answer.in_collective)

    # ---- prompts ------------------------------------------------------------------------------------------------

    @property
    def busy(self) -> tuple[int, ...]:
        """The members that have a call to answer, in order."""
        return self._waiting_in(lambda call: True)

    @property
    def called_at(self) -> float:
        """When a call to any rank of the mesh was last made, by the monotonic clock; now, while one runs."""
        return time.monotonic() if self._controller.open_calls(self._mesh.id) else self._mesh.called_at

    def _waiting_in(self, is_meant: Callable[[OpenCall], bool]) -> tuple[int, ...]:
        calls = [call for call in self._controller.open_calls(self._mesh.id) if is_meant(call)]
        return tuple(rank for rank in self.ranks if any(rank in call.waiting for call in calls))

    @property
    def stopped_ranks(self) -> StoppedRanks:
        """The ranks of the mesh that wait at a prompt of pdb, as far as they have told of it."""
        return self._mesh.stopped_ranks

    def stopped(self) -> tuple[int, ...]:
        """The members that wait at a prompt of pdb, also those that stopped under an earlier controller."""
        prompts = self.ask_for(AtPrompt, "pdb_prompt")
        self._controller.merge_prompts(self._mesh, prompts)
        return tuple(self.stopped_ranks.of(self.ranks))

    def type_line(self, line: str, prompts: Mapping[int, int]) -> None:
        """Type a line at prompts. prompts: rank to the number of its prompt; where it has gone on, nothing happens."""
        for number in set(prompts.values()):
            ranks = [rank for rank, its in prompts.items() if its == number]
            self._controller.questions.tell(self._mesh, ranks, ask_rank("pdb_command", number, line))

    def postmortem(self) -> CallFuture[Values]:
        """Have the members, which must be idle, open a prompt each on the frames of their last exception.

        Completes when the person has left all of them.
        """
        return self._call("postmortem", (), what="the post-mortem", fail_fast=False)

    def interrupt(self) -> CallInterrupted:
        """Interrupt all that runs or waits on these ranks, whoever started it; the second time more insistently.

        Returns in less than a second: who obeyed, and where the others are and why (`meshbook.calls.interrupt`).
        """
        ranks = set(self._members.ranks())
        known = self._controller.ask(lambda: self._controller.open_calls(self._mesh.id))  # with what was just submitted
        calls = [call for call in known if not ranks.isdisjoint(call.waiting)]
        return interrupt(self._controller, calls, ranks)

    def stop(self, reason: str = "", *, timeout_s: float = 10.0) -> Future[None]:
        """End every process of the mesh, views included; returns when none is left. Idempotent.

        reason: accepted, since Monarch has it. Returns: a future that is done, for programs that wait for it.
        """
        self._controller.stop_mesh(self._mesh, STOP_GRACE_S)
        try:
            self._mesh.stopped.get(timeout_s)
        except TimeoutError:
            self._explain_slow_stop()
        if self._mesh.owns_hosts:
            self._mesh.owns_hosts = False
            self._controller.stop_hosts(self._mesh.hosts, timeout_s)
        return Future.completed(None)

    def _explain_slow_stop(self) -> None:
        """Not all processes are known to have ended. Raises: MeshError, unless their hosts are ended by force."""
        if self.suspects and self._mesh.owns_hosts:
            return
        silent = [f"Host {name} is {why}; they end when it answers. " for name, why in self.suspects.items()]
        raise MeshError(
            f'mesh "{self.name}" was told to stop, but not all of its processes are known to have ended. '
            f"{''.join(silent)}To end all hosts of this session by force: meshbook.shutdown()"
        )

    def __enter__(self) -> ProcMesh:
        """Raises: MeshStoppedError for a mesh that was stopped."""
        self._mesh.check_usable()
        return self

    def __exit__(self, *error: object) -> None:
        self.stop()

    async def __aenter__(self) -> ProcMesh:
        return self.__enter__()

    async def __aexit__(self, *error: object) -> None:
        self.stop()

    def __reduce__(self) -> tuple[object, ...]:
        """On a rank it is a `meshbook.actor.proc_ref.ProcRef`. Waits until the processes are there."""
        if self.alive:
            self._mesh.await_arrival()
        return find_procs, (self.session, self.id, self.name, self._members, self._generation)

    def __repr__(self) -> str:
        arrival = self._mesh.arrival
        state = "" if self.alive else ", stopped"
        if arrival is not None and not arrival.is_over:
            state = ", starting"
        elif isinstance(self._mesh.not_started, ProcsNotStartedError):
            state = ", not started"
        return f'ProcMesh("{self.name}", {format_sizes(self.sizes)}, {self._device}{state})'
