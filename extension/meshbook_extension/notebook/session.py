"""The session of one notebook: its meshes, the current one, named slices, jobs."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, NamedTuple, TypeVar

from meshbook.errors import MeshStoppedError, UsageError
from meshbook.formatting import did_you_mean, did_you_mean_variable, format_sizes
from meshbook_extension.notebook.error_log import ErrorLog
from meshbook_extension.notebook.targets import Setups, choose
from meshbook_extension.output.publisher import Publisher

if TYPE_CHECKING:
    from IPython.core.interactiveshell import ExecutionResult, InteractiveShell

    from meshbook.mesh.proc_mesh import ProcMesh

P = TypeVar("P")

DEFAULT_NAME = "main"
LAST_RESULT = "_mesh"
"""The variable that has the ValueMesh of the last mesh cell."""
PROCS = "procs"
"""The variable that has the current mesh, unless the person has bound it."""


class NamedSlice(NamedTuple):
    """A view that ``%mesh slice`` gave a name, and the mesh that it is a part of."""

    mesh: str
    view: ProcMesh
    pairs: Mapping[str, str] | None = None
    """The target as it was written, so that the slice can be cut again when the mesh has changed."""


class Session:
    """The session of an IPython shell, which `meshbook_extension.wiring` opens. The person stops its meshes."""

    def __init__(self, shell: InteractiveShell, notebook: str = "") -> None:
        self.shell = shell
        self.notebook = notebook
        """The notebook's key for its next kernel; empty where there is none."""
        self.publisher = Publisher()
        self.closing = contextlib.ExitStack()
        """The steps that close the session, the last one first. Its meshes run on."""
        self.setups = Setups()
        self.meshes: dict[str, ProcMesh] = {}
        """The meshes by name, as they are arranged now: `split`, `rename` and `flatten` put another view here."""
        self.slices: dict[str, NamedSlice] = {}
        self._current: str | None = None
        self._bound: ProcMesh | None = None
        """The mesh that `PROCS` was last bound to here."""
        self.returned: set[str] = set()
        """The names of meshes that an earlier kernel of this notebook has spawned."""
        self.errors = ErrorLog()
        self.named_targets: list[tuple[Sequence[str], dict[str, str], ProcMesh]] = []
        """The targets that the running cell and its commands have named, with the ranks that they mean."""
        self.on_change: list[Callable[[], object]] = []
        """Listeners that are called when a job has begun."""
        self.on_forget: list[Callable[[str], object]] = []
        """Listeners that are called with the name of a mesh that was stopped."""
        self._parts: dict[type, object] = {}
        self._left: tuple[str, str] | None = None
        """The name of the mesh that was stopped last, and the time of day at which it was detached, if it was."""

    def go_on(self, earlier: Session) -> None:
        """Take over the meshes, slices and errors of a closed session of the same shell."""
        self.meshes, self.slices, self.current = earlier.meshes, earlier.slices, earlier.current
        self.setups, self.returned, self.errors = earlier.setups, earlier.returned, earlier.errors

    def part(self, kind: type[P]) -> P:
        """Return the object that another room keeps for this session, such as its `Jobs`, made at the first call."""
        if kind not in self._parts:
            self._parts[kind] = kind()
        part = self._parts[kind]
        assert isinstance(part, kind)
        return part

    def add_part(self, part: P) -> P:
        """Keep a part whose constructor takes arguments, and return it."""
        self._parts[type(part)] = part
        return part

    def note_error(self, result: ExecutionResult) -> None:
        """Keep the failures that calls of the ended cell have raised."""
        number = getattr(result, "execution_count", None)
        self.errors.note_raised(self.current or "", f"cell {number}" if number else "", result.error_in_exec)

    # ---- meshes ----------------------------------------------------------------------------------------------

    @property
    def current(self) -> str | None:
        """The name of the mesh that commands mean without a name; `PROCS` follows it."""
        return self._current

    @current.setter
    def current(self, name: str | None) -> None:
        self._current = name
        names, procs = self.shell.user_ns, self.meshes.get(name or "")
        if PROCS in names and (self._bound is None or names[PROCS] is not self._bound):
            return
        if procs is not None:
            self.shell.push({PROCS: procs}, interactive=False)
        elif PROCS in names:
            self.shell.drop_by_id({PROCS: self._bound})
        self._bound = procs

    def arrange(self, procs: ProcMesh) -> None:
        """Take a mesh in another arrangement, or with other ranks, under the name that it has."""
        self.meshes[procs.name] = procs
        if procs.name == self.current:
            self.current = procs.name

    def mesh(self, name: str | None = None) -> ProcMesh:
        """Return the mesh of this name, or the current one.

        Raises: UsageError when there is none, MeshStoppedError when it was stopped.
        """
        name = name or self.current
        if name is None:
            if self._left:
                left, at = self._left
                if at:
                    raise UsageError(f"{self.absence}. Back to it: %mesh attach {left}")
                raise MeshStoppedError(left)
            raise UsageError("no mesh yet. Start one: %mesh spawn gpus=4")
        if name not in self.meshes:
            names = ", ".join(self.meshes)
            raise UsageError(
                f'there is no mesh "{name}".{did_you_mean(name, self.meshes)}\n'
                + (f"  meshes: {names}; make one current: %mesh use {next(iter(self.meshes))}" if names else "")
                + ("" if names else "  start one: %mesh spawn gpus=4")
            )
        procs = self.meshes[name]
        if not procs.alive:
            raise MeshStoppedError(name)
        from meshbook.mesh.proc_view import is_renumbered  # it is there with the first mesh

        if is_renumbered(procs):  # a program has grown or shrunk it
            procs = procs.base()
            self.arrange(procs)
        return procs

    @property
    def absence(self) -> str:
        """The reason why there is no current mesh, in words."""
        if self._left is None:
            return "no mesh yet"
        name, at = self._left
        return f'mesh "{name}" was {f"detached at {at}" if at else "stopped"}'

    def add(self, procs: ProcMesh) -> None:
        """Add a mesh and make it the current one."""
        self._drop_slices(procs.name)
        self.setups.forget(procs.name)
        self.meshes[procs.name] = procs
        self.current = procs.name

    def forget(self, name: str, *, detached: bool = False) -> None:
        """Forget a mesh that was stopped or detached. Another one, if there is one, becomes the current one."""
        for listener in self.on_forget:
            listener(name)
        self.meshes.pop(name, None)
        self._drop_slices(name)
        self.setups.forget(name)
        self.returned.discard(name)
        self._left = name, time.strftime("%H:%M") if detached else ""
        if self.current == name:
            self.current = next(reversed(self.meshes), None)

    def check_name_is_free(self, name: str, otherwise: str = "--name other") -> None:
        """Raise UsageError if a living mesh has this name. otherwise: the option that gives another."""
        taken = self.meshes.get(name)
        if taken is not None and taken.alive:
            raise UsageError(
                f'mesh "{name}" runs already ({format_sizes(taken.sizes)}).\n'
                f"  go on with it: %mesh use {name}    end it: %mesh stop {name}    another beside it: {otherwise}"
            )

    def _drop_slices(self, mesh: str) -> None:
        self.slices = {name: named for name, named in self.slices.items() if named.mesh != mesh}

    # ---- targets ---------------------------------------------------------------------------------------------

    def target(self, words: Sequence[str] = (), pairs: Mapping[str, str] | None = None) -> ProcMesh:
        """Return the ranks that a command of the running cell means, and note them for its record.

        Raises: as `find_ranks`.
        """
        found = self.find_ranks(words, pairs)
        self.named_targets.append((words, dict(pairs or {}), found))
        return found

    def find_ranks(self, words: Sequence[str] = (), pairs: Mapping[str, str] | None = None) -> ProcMesh:
        """Return the ranks that a target means; see `meshbook_extension.notebook.targets`.

        words: at most one, the name of a slice or of a mesh. Raises: UsageError, MeshStoppedError, ShapeError.
        """
        view = self._named(words[0]) if words else self.mesh()
        return choose(view, pairs or {})

    def _named(self, word: str) -> ProcMesh:
        if word in self.slices:
            self.mesh(self.slices[word].mesh)  # it may have been stopped
            return self.slices[word].view
        if word in self.meshes:
            return self.mesh(word)
        sizes = self.mesh().sizes
        if not word.isidentifier():
            axis = next(iter(sizes), "rank")
            raise UsageError(f"{word} of what? Name the axis: {axis}={word}, or rank={word} for ranks by their number.")
        if word in sizes or word == "rank":
            raise UsageError(f"say which: {word}=0, {word}=0:2, {word}=0,2 or {word}=: (all of it).")
        near = did_you_mean(word, [*self.slices, *self.meshes])
        known = f"  slices: {', '.join(self.slices)}\n" if self.slices else ""
        raise UsageError(
            f'there is no slice "{word}".{near} This mesh has {format_sizes(sizes)}.\n{known}'
            f"  name one: %mesh slice {word} {next(iter(sizes), 'rank')}=0"
        )

    # ---- the notebook's names --------------------------------------------------------------------------------

    def bind(self, name: str, value: object) -> None:
        """Give ``value`` a name in the notebook, as the person asked for."""
        if name == PROCS:
            self._bound = None
        self.shell.push({name: value}, interactive=not name.startswith("_"))

    def keep_result(self, value: object, name: str | None = None) -> None:
        """Bind the result of a cell to ``_mesh``, and to the name that the person chose."""
        self.bind(LAST_RESULT, value)
        if name is not None:
            self.bind(name, value)

    def lookup(self, name: str) -> object:
        """Return a value of the notebook by its name.

        Raises: UsageError naming the near match.
        """
        if name not in self.shell.user_ns:
            near = did_you_mean_variable(name, self.shell.user_ns)
            raise UsageError(f'the notebook has no "{name}".{near}')
        value: object = self.shell.user_ns[name]
        return value
