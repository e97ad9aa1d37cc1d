"""ProcMesh: one process per point, arranged by named axes; users hold it, slice it and call it."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from meshbook.actor.actor_mesh import find_procs, spawn_actors
from meshbook.actor.context import EndsWithBlock
from meshbook.actor.errors import ActorError, ProcsNotStartedError, ProcsStoppedError
from meshbook.actor.identity import ActorState
from meshbook.actor.router import TActor, Values, router_for
from meshbook.calls.call_future import CallFuture
from meshbook.calls.interrupt import interrupt
from meshbook.concurrency.future import Future, MappedFuture, in_background, join_futures
from meshbook.controller.mesh_state import Repaired, stale_view
from meshbook.controller.queries import StackQuestion, read_logs
from meshbook.errors import CallInterrupted, ItemFailed, LayoutError, MeshError, SerializationError, UsageError
from meshbook.formatting import Table, format_bytes, format_sizes
from meshbook.groups.collectives_off import WITHOUT_TORCH
from meshbook.launchers.base import Launcher
from meshbook.mesh import partition, rank_calls, states
from meshbook.mesh.item_map import ItemMap
from meshbook.mesh.peeks import TIMEOUT_S, peek
from meshbook.mesh.proc_view import ProcView
from meshbook.mesh.repair import Note, repair
from meshbook.mesh.resize import resize
from meshbook.mesh.states import RankStatus
from meshbook.shape.members import Choice, Extent, Region, arrange
from meshbook.shape.value_mesh import ValueMesh
from meshbook.shell.postmortem_memory import Freed
from meshbook.source.location import source_of, sources_of
from meshbook.stacks.mesh_stacks import MeshStacks
from meshbook.values.main_names import Sending
from meshbook.workspace.modules import Synced, find_modules, take_modules

if TYPE_CHECKING:
    from meshbook.mesh.host_mesh import HostMesh
    from meshbook.tensors.handles.mesh_tensor import MeshTensor

T = TypeVar("T")

STOP_GRACE_S = 1.0
"""Busy workers have this long to end when a mesh is stopped."""

_NO_RANKS: frozenset[int] = frozenset()
_EXECUTED = Sending("missing")


class ProcMesh(EndsWithBlock, ProcView):
    """A mesh of worker processes, or a view of some of them; views share the processes and cost nothing.

    Calls return a `Future`; ``.get()`` waits. Each call runs once on every member, in the order in which it was made.
    """

    # ---- code and values --------------------------------------------------------------------------------------------

    def run(self, code: str, *, forbid_collectives: bool = False) -> Future[Values]:
        """Run ``code`` as an IPython cell on every member; the values are those of its last expression.

        forbid_collectives: a collective raises rather than wait for ranks that do not run this cell.
        """
        return self._call("run_cell", (code, None, 0, forbid_collectives), what="the cell", fail_fast=False)

    def execute(self, function: Callable[..., T], *args: object, **kwargs: object) -> Future[ValueMesh[T]]:
        """Call ``function(*args, **kwargs)`` on every member.

        Functions and classes of the notebook travel by value, as they are now. Raises: SerializationError.
        """
        name = getattr(function, "__name__", "a function")
        file: str | None = getattr(getattr(function, "__code__", None), "co_filename", None)
        ranks, sources = self._members.rank_set, self._mesh.sources
        if file is None or ranks <= sources.get(file, _NO_RANKS):
            return self._invoke("invoke", name, (), function, args, kwargs)
        # It brings its text itself: a call goes past whatever is on its way by the agent.
        future = self._invoke("invoke_with_source", name, (source_of(file),), function, args, kwargs)
        sources.setdefault(file, set()).update(ranks)
        return future

    def map(
        self, function: Callable[[Any], T], items: Iterable[object], *, return_exceptions: bool = False
    ) -> list[T | ItemFailed]:
        """Wait for ``function(item)`` of all items, each on the next rank that is free; return them in order.

        The item of a rank that ends goes to another one, once. return_exceptions: an error is the result of its item.
        Raises: ItemFailed, which names the item and the rank, and CallInterrupted; no rank is at an item then, and
        ``partial`` has the results so far by the numbers of items. SerializationError.
        """
        from meshbook.mesh.prompt import tell_person  # which stands above us

        return ItemMap(self._present(), function, items, return_exceptions, tell_person).run()

    def _invoke(
        self,
        endpoint: str,
        name: str,
        about: tuple[object, ...],
        function: Callable[..., T],
        args: tuple[object, ...],
        kwargs: dict[str, object],
    ) -> Future[ValueMesh[T]]:
        """Call ``function`` on the ranks through an endpoint.

        about: the endpoint's arguments in front of the function. Raises: SerializationError.
        """
        try:
            return self._call(endpoint, (*about, function, *args), kwargs, what=name, sending=_EXECUTED)
        except SerializationError:  # once more, to say which argument it was
            roots = {name: function, **{f"argument {index}": value for index, value in enumerate(args, 1)}, **kwargs}
            return self._call(endpoint, (*about, function, *args), kwargs, what=name, roots=roots)

    def evaluate(self, expression: str, *, now: bool = False, timeout_s: float = TIMEOUT_S) -> Future[Values]:
        """Bring the value of an expression in each member's namespace.

        now: evaluate it in the midst of what the ranks run, not afterwards. It may take ``timeout_s`` there, and may
        not wait: collectives raise PeekRefused. Names that it binds are dropped, random state is restored. The value
        is a `meshbook.mesh.peeks.NoValue` where a rank runs native code for more than 0.5 s.
        """
        if now:
            return in_background(lambda: peek(self, expression, timeout_s).checked())
        return self._call("pull", ([expression],), what=expression)

    def pull(self, name: str, *, now: bool = False, timeout_s: float = TIMEOUT_S) -> Future[Values]:
        """Bring the value of ``name`` from every member. now, timeout_s: as of `evaluate`."""
        return self.evaluate(name, now=now, timeout_s=timeout_s)

    def push(self, values: Mapping[str, object]) -> Future[ValueMesh[None]]:
        """Bind names on every member. Functions and classes among the values read the ranks' own names when they run.

        Names that such functions read and that travel with them are bound too, where the rank has none of that name.
        Raises: SerializationError naming the part that cannot travel.
        """
        sending = Sending("rank", values.values())
        about = dict(values), sources_of(*values.values())
        return self._call("push", about, what="push", roots=values, sending=sending)

    def broadcast(self, name: str, src: int = 0) -> Future[ValueMesh[None]]:
        """Bind ``name`` on every member to its value on base rank ``src``, by the process group.

        The group spans the whole mesh, so every rank must take part. Raises: RankError, LayoutError on a partial view.
        """
        if len(self) != self._mesh.extent.nelements:
            raise LayoutError("broadcast runs in the mesh's process group: call it on the whole mesh, not on a slice.")
        self._members.point(src)
        return self._call("broadcast", (name, src), what=f"broadcast of {name}")

    def scatter(self, name: str, value: object, axis: str | None = None, dim: int = 0) -> Future[list[ValueMesh[None]]]:
        """Bind ``name`` to one piece of ``value`` per index of ``axis``; members that share the index get the same.

        value: a tensor or array, cut along ``dim`` as by ``tensor_split``, or a sequence. axis: the mesh's only axis by
        default.
        """
        axis = self._one_axis(axis)
        pieces = partition.split(value, self.size(axis), dim)
        futures = [self.slice(**{axis: i}).push({name: piece}) for i, piece in enumerate(pieces)]
        return join_futures(futures)

    def gather(self, name: str, axis: str | None = None, dim: int = 0) -> Future[Any]:
        """Bring ``name`` from the members along ``axis`` (index 0 of all others) and join it along ``dim``."""
        axis = self._one_axis(axis)
        others: dict[str, Choice] = {label: 0 for label in self.sizes if label != axis}
        members = self.slice(**others)
        pieces = members._call("pull", ([name], list(members.ranks)), what=name)
        return MappedFuture(pieces, lambda values: partition.join(values.values(), dim))

    def _one_axis(self, axis: str | None) -> str:
        if axis is not None:
            self._members.size(axis)
            return axis
        if len(self.sizes) != 1:
            raise LayoutError(
                f"this mesh has {format_sizes(self.sizes)}: say which axis, as in axis={next(iter(self.sizes), '')!r}."
            )
        return next(iter(self.sizes))

    def free(self) -> Future[ValueMesh[Freed]]:
        """Let go of the frames of each member's last exception, with their tensors, and of device caches.

        No post-mortem is possible after that.
        """
        return self._call("free", (), what="free")

    def sync_workspace(
        self, workspace: str | Path = ".", conda: bool = False, auto_reload: bool = False
    ) -> Future[ValueMesh[dict[str, Synced]]]:
        """Send the Python modules at a path to the members, which import them from memory and reload those in use.

        workspace: a module's file, a package, or a folder that has some. Values: the outcome of each module, by name.
        conda, auto_reload: Monarch's. Modules in use are reloaded either way.
        Raises: UsageError for a module that does not parse, and for ``conda=True``: packages are installed there.
        """
        if conda:
            raise UsageError("conda=True: the packages of an environment are not sent; install them there, by pip.")
        found = find_modules(Path(workspace))
        for name, problem in found.broken.items():
            raise UsageError(f"{name} does not parse ({problem}); nothing was sent")
        return rank_calls.execute_as(self, "sync_workspace", take_modules, found.modules)

    # ---- actors and tensors -----------------------------------------------------------------------------------------

    def spawn(self, name: str, cls: type[TActor], /, *args: object, **kwargs: object) -> TActor:
        """Make an actor ``cls(*args, **kwargs)`` in every process; returns an `ActorMesh` at once.

        For type checkers it is a ``cls``, whose endpoints have the adverbs of `meshbook.actor.Endpoint`. A constructor
        that fails fails the first call. Raises: UsageError if ``cls`` is no actor class, ArgumentsError,
        SerializationError.
        """
        if self._generation != self._mesh.generation:
            raise stale_view(self._mesh)
        if not (self.alive or self._mesh.detached):
            raise self._mesh.not_started or ProcsStoppedError(self.name)
        router = router_for(self.session)
        return spawn_actors(router, self.id, self.name, self._members, name, cls, args, kwargs, self._generation)

    def actors(self) -> list[ActorState]:
        """Return the present activity of the members' actors, ordered by name, then by rank."""
        return states.actors(self)

    def activate(self) -> AbstractContextManager[None]:
        """Return a context in which tensors begin on each of these processes; see docs/tensors.md."""
        from meshbook.tensors.handles.local_view import activate

        return activate(self)

    def rank_tensor(self, dim: str | Sequence[str]) -> MeshTensor:
        """Return each process's own index along an axis, or along several as one, as a tensor of the local view."""
        from meshbook.tensors.handles.local_view import rank_tensor

        return rank_tensor(self, dim)

    def rank_tensors(self) -> dict[str, MeshTensor]:
        """Return the `rank_tensor` of each axis."""
        return {axis: self.rank_tensor(axis) for axis in self.sizes}

    # ---- state ------------------------------------------------------------------------------------------------------

    @property
    def initialized(self) -> Future[bool]:
        """A future that is True when all processes are there.

        Raises, when asked: ActorError if ``bootstrap`` has raised; ProcsNotStartedError for all else.
        """
        arrival = self._mesh.arrival
        if arrival is None:
            return Future.completed(True)
        arrival.is_asked = True
        asked: Future[bool] = Future()

        def settle(done: Future[bool]) -> None:
            if (error := done.exception(0)) is None:
                asked.set_result(True)
            else:
                why = error.__cause__.__cause__ if error.__cause__ is not None else None
                asked.set_exception(why if isinstance(why, ActorError) else error)

        arrival.done.add_done_callback(settle)
        return asked

    @property
    def hosts(self) -> tuple[str, ...]:
        """The names of the mesh's hosts, in rank order."""
        return tuple(host.name for host in self._mesh.hosts)

    @property
    def host_mesh(self) -> HostMesh:
        """The hosts of these processes: along the axes that count hosts if these are whole, else along one axis."""
        from meshbook.mesh.host_mesh import HostMesh  # which stands above us

        mesh = self._mesh
        hosts = list(dict.fromkeys(mesh.host_of(rank) for rank in self.ranks))
        sizes = {axis: size for axis, size in self.sizes.items() if axis in mesh.host_axes}
        if Extent.of(sizes).nelements != len(hosts):
            sizes = {"hosts": len(hosts)} if len(hosts) > 1 else {}
        members = arrange(Extent.of(sizes), range(len(hosts))) if sizes else Region.of({})
        return HostMesh(self._controller, hosts, members, waits=mesh.arrival is None).apart(mesh.siblings)

    @property
    def lost(self) -> tuple[int, ...]:
        """The members that have ended without being told to, in order."""
        return tuple(rank for rank in self.ranks if rank in self._mesh.lost)

    def status(self) -> list[RankStatus]:
        """Ask each member for its state now."""
        return states.status(self)

    def to_table(self) -> Table:
        """Return a table of the processes: rank, place, host, pid, device, state and memory."""
        rows = []
        for one in self.status():
            cells = (one.rank, one.point, one.host, one.pid, one.device, one.state, format_bytes(one.rss_bytes))
            rows.append(list(map(str, cells)))
        return Table(("rank", "point", "host", "pid", "device", "state", "memory"), rows)

    def stacks(self, *, all_threads: bool = False, native: bool = False, timeout_s: float = 3.0) -> MeshStacks:
        """Return the Python stacks of the members, busy, blocked or stopped; and in words who holds the others up.

        all_threads: not only the main thread. native: with the frames of native code, which py-spy reads.
        timeout_s: how long ranks that cannot answer may take to be read from outside.
        """
        self._mesh.check_usable()
        question = StackQuestion(all_threads, native, timeout_s)
        return self._controller.stacks(self._mesh, self._present()._members, question)

    def postmortem(self) -> CallFuture[Values]:
        """Have the members, which must be idle, open a prompt each on the frames of their last exception.

        Completes when the person has left all of them.
        """
        return self._call("postmortem", (), what="the post-mortem", fail_fast=False)

    # ---- logs -------------------------------------------------------------------------------------------------------

    def log_paths(self) -> dict[int, str]:
        """Return the path of each member's log on its host."""
        return {rank: self._mesh.workers[rank].log_path for rank in self.ranks if rank in self._mesh.workers}

    def logs(self, lines: int = 20, *, containing: str = "") -> dict[int, str]:
        """Return the last lines that each member wrote, also of members that have ended; of silent hosts none.

        containing: only lines with this text, among the last 256 kB of each.
        """
        self._present()
        return read_logs(self._controller.questions, self._mesh, self._members, lines, containing)

    def logging_option(self, stream_to_client: bool = False, level: int = logging.INFO) -> Future[None]:
        """Show or hide the prints of calls, and have ranks log to stderr from a level on; done when they all do.

        stream_to_client: show prints as they come, which is the default; False leaves them to the logs. The prints of
        cells are shown either way. Raises: UsageError if ``level`` is none.
        """
        return rank_calls.set_logging(self, stream_to_client, level)

    # ---- repairs and sizes ------------------------------------------------------------------------------------------

    def heal(
        self,
        setup: Sequence[str] = (),
        *,
        force: bool = False,
        note: Note | None = None,
        launcher: Launcher | None = None,
        within_s: float | None = None,
    ) -> Repaired:
        """Start the ranks that ended again, with new agents where theirs are lost, and form the groups with all ranks.

        The others keep their state; the new ones have none. They run the cells ``setup``, alone.
        force: also a rank that ends again and again, and the ranks of hosts that are silent, which are given up.
        note: called once, with a line that names the slow step.
        launcher: starts replacements of lost hosts; by default these come back as they came.
        within_s: as of `HostMesh.spawn_procs`.
        Raises: CrashLoopError, SpawnError, MeshStoppedError, UsageError, all of them `DeviceMeshError`;
        KeyboardInterrupt, and then it can be healed again.
        """
        return repair(self, (), setup, force=force, note=note, launcher=launcher, within_s=within_s)

    def respawn(
        self,
        ranks: int | Iterable[int],
        setup: Sequence[str] = (),
        *,
        force: bool = False,
        note: Note | None = None,
        within_s: float | None = None,
    ) -> Repaired:
        """End ``ranks``, busy or not, and start them again in their places, as `heal` does with all that ended."""
        chosen = [ranks] if isinstance(ranks, int) else list(ranks)
        for rank in chosen:
            self._present()._members.point(rank)
        return repair(self, chosen, setup, force=force, note=note, within_s=within_s)

    @property
    def last_repair(self) -> Repaired | None:
        """The report of the last repair of the whole mesh, by any caller; None before the first."""
        return self._mesh.last_repair

    def rebuild_groups(self) -> Future[ValueMesh[None]]:
        """Form the default process group of the whole mesh and prove it with a collective.

        Groups that are there are formed again, in place: DeviceMeshes, DTensors and modules made before work on.
        Raises: UsageError if the mesh has no torch.
        """
        if not self._mesh.recipe.torch:
            raise UsageError(WITHOUT_TORCH)
        self._mesh.await_arrival()
        return self._controller.form_groups(self._mesh)

    def grow(self, launcher: Launcher | None = None, /, *, within_s: float | None = None, **more: int) -> ProcMesh:
        """Add indices at the ends of axes: ``grow(gpus=2)``; returns the whole mesh as it is then.

        Ranks that are there keep their processes and state, and their numbers unless new ranks come before them. New
        ranks have no state. Along an axis that counts hosts new hosts are started, if the mesh has hosts of its own: by
        ``launcher``, else as its first one was. within_s: as of `HostMesh.spawn_procs`.
        Raises: UsageError while a cell runs, UnknownAxisError, DeviceError, SpawnError: then the mesh is as it was.
        """
        return resize(self, grow=more, launcher=launcher, within_s=within_s).procs

    def shrink(self, **fewer: int) -> ProcMesh:
        """Remove indices of axes: ``shrink(gpus=1)``, those of dead ranks first, then from the end; see `grow`.

        Without an axis: go on without the dead ranks, along the axis that loses the fewest others.
        """
        return resize(self, shrink=fewer).procs

    # ---- ends -------------------------------------------------------------------------------------------------------

    def interrupt(self) -> CallInterrupted:
        """Interrupt all that runs or waits on these ranks, from any caller; the second time more insistently.

        Returns in less than a second: which ranks obeyed, and where the others are and why
        (`meshbook.calls.interrupt`).
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
            suspects = states.suspects(self)
            if not (suspects and self._mesh.owns_hosts):  # else they are ended by force
                silent = [f"Host {name} is {why}; they end when it answers. " for name, why in suspects.items()]
                raise MeshError(
                    f'mesh "{self.name}" was told to stop, but not all of its processes are known to have ended. '
                    f"{''.join(silent)}To end all hosts of this session by force: meshbook.shutdown()"
                ) from None
        if self._mesh.owns_hosts:
            self._mesh.owns_hosts = False
            self._controller.stop_hosts(self._mesh.hosts, timeout_s)
        return Future.completed(None)

    def __enter__(self) -> ProcMesh:
        """Raises: MeshStoppedError for a mesh that was stopped."""
        self._mesh.check_usable()
        return self

    def __reduce__(self) -> tuple[object, ...]:
        """Pickle a reference, a `meshbook.actor.actor_mesh.ProcRef` on a rank. Waits until the processes are there."""
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
        return f'ProcMesh("{self.name}", {format_sizes(self.sizes)}, {states.known_device(self)}{state})'
