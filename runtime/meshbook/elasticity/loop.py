"""`elastic`: a loop of training over mesh tensors in which each batch counts once, although ranks end.

    batch ──> body ──> next batch          a save every so many batches
                └─ a rank ended ──> healed, or a smaller mesh ──> state and stream of the last save ──> batches since

Failures come late: nothing is waited for until a value is needed. So what is done counts only from the next save on,
which waits for all of it, and the loop ends with one.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator, MutableMapping
from os import PathLike
from pathlib import Path
from typing import Any, Generic, TypeVar

from meshbook.checkpoint.folder import Saved
from meshbook.concurrency.future import Future
from meshbook.elasticity.recovery import can_recover, check_min_ranks, describe_loss, recover
from meshbook.errors import UsageError, WorkerLost
from meshbook.mesh.proc_view import is_renumbered
from meshbook.tensors.data.streams import is_stateful
from meshbook.tensors.handles.checkpoints import StateTensors, begin_save, restore
from meshbook.tensors.handles.distributed_mesh import Mesh

T = TypeVar("T")

FAILURES, SETBACKS = 3, 10
"""The number of failures of one batch in a row, and of any batches without a save between them, that end the loop."""

LOOK_S = 0.5
"""The interval at which the wait for a save looks for ranks that have ended."""

KEPT = 2
"""The number of saves that are kept: the last one may be cut off by the end of a rank."""


def elastic(
    stream: Iterable[T],
    state: MutableMapping[str, Any],
    *,
    save: str | PathLike[str],
    every: int = 100,
    min_ranks: int | None = None,
    within_s: float | None = None,
) -> ElasticLoop[T]:
    """Return the batches of a stream for a loop that goes on when ranks end, each batch counted once.

    After a failure the mesh is healed, ``state`` and the stream are set back to the last save, and the batches since
    are given again. In a notebook the body of ``for batch in meshbook.elastic(...)`` is watched as it is; elsewhere it
    stands in ``with loop.attempt():``. Effects of the body on things outside of ``state`` are repeated.
    stream: of `meshbook.stream`, or another with ``state_dict`` and ``load_state_dict``, which goes on where it is set.
    state: modules, optimizers, mesh tensors, lists and what else `meshbook.save` takes, by name.
    save: the folder, which all hosts share. every: batches from save to save. min_ranks: go on with so few ranks where
    the mesh cannot be healed; by default with all only. within_s: as of `ProcMesh.heal`.
    Raises: UsageError for a stream that cannot be set back. In the loop: the error of a batch that fails three times in
    a row, or of the tenth failure without a save between them; and errors that do not follow from the end of a rank.
    """
    return ElasticLoop(stream, state, save, every, min_ranks, within_s)


class ElasticLoop(Generic[T]):
    """The batches of an elastic loop; see `elastic`."""

    def __init__(
        self,
        stream: Iterable[T],
        state: MutableMapping[str, Any],
        folder: str | PathLike[str],
        every: int,
        min_ranks: int | None,
        within_s: float | None,
    ) -> None:
        if not is_stateful(stream):
            raise UsageError(
                f"elastic has to set its stream back, and {type(stream).__name__} has no state_dict and no "
                "load_state_dict: give meshbook.stream(source, mesh) of a list of batches, or of torchdata's "
                "StatefulDataLoader"
            )
        stream.state_dict()  # type: ignore[attr-defined]  # raises where its source cannot be set back
        if not isinstance(state, MutableMapping) or not state or "stream" in state:
            raise UsageError(
                'state names what a save holds, as in {"model": model, "opt": opt}; the stream is in it by itself'
            )
        if every < 1:
            raise UsageError(f"every={every}: a save is made each so many batches, 1 or more")
        self._stream = stream
        self._state = state
        self._tensors = StateTensors(state)
        self._folder = str(Path(folder).expanduser().absolute())
        self._every = every
        self._min_ranks = min_ranks
        self._within_s = within_s
        meshes = self._meshes
        if not meshes:
            raise UsageError(
                "neither the state nor the stream of elastic is on a mesh: use meshbook.module_to_mesh, or for a "
                "function of the ranks meshbook.elastic_script"
            )
        self._procs = meshes[0].procs.base()
        check_min_ranks(min_ranks, self._procs)
        if min_ranks is not None and any(each.axes != dict(self._procs.extent) for each in meshes):
            raise UsageError(
                "min_ranks needs all tensors on the whole mesh, along its own axes: leave it out for slices"
            )
        self.done = 0
        """The number of batches that are done."""
        self.recoveries = 0
        """The number of times that the loop was set back."""
        self._items: Iterator[T] | None = None
        self._is_given = False
        """Whether a batch is given whose body was not attempted yet."""
        self._error: Exception | None = None
        """The failure from which to recover."""
        self._failed = -1
        """The batch that has failed last."""
        self._failures = 0
        """The number of its failures in a row."""
        self._setbacks = 0
        """The number of failures since the last save."""
        self._last: Saved | None = None
        """The last save; its step is the number of batches done then."""
        self._pending: Future[Saved] | None = None
        """A save that is being written."""
        self._asked = -1
        """The number of batches done when a save was asked for last."""

    @property
    def _meshes(self) -> list[Mesh]:
        mesh = getattr(self._stream, "mesh", None)
        return list(dict.fromkeys([*self._tensors.meshes, *([mesh] if isinstance(mesh, Mesh) else [])]))

    # ---- the loop ---------------------------------------------------------------------------------------------------

    def __iter__(self) -> ElasticLoop[T]:
        return self

    def __next__(self) -> T:
        if self._is_given:
            raise UsageError(
                "the body of an elastic loop stands in a block, so that it can be run again; only in a cell of a "
                "notebook a loop over meshbook.elastic(...) itself does without:\n"
                "  loop = meshbook.elastic(...)\n  for batch in loop:\n      with loop.attempt():"
            )
        while True:
            if (error := self._error) is not None:
                self._error = None
                self._recover(error)
            try:
                if self._items is None:
                    self._items = iter(self._stream)
                if self.done % self._every == 0:
                    self._save()
                for batch in self._items:
                    self._is_given = True
                    return batch
                self._save()  # which waits for all that was done
                self._finish_save()
            except Exception as error:
                if not can_recover(error, self._procs):
                    raise
                self._error = error
            else:
                raise StopIteration

    @contextlib.contextmanager
    def attempt(self) -> Iterator[None]:
        """Return the block for the body of the loop, which ends early when a rank ends."""
        counts, self._is_given = self._is_given, False  # a cell's body may have a block in the block
        try:
            yield
        except Exception as error:
            if not can_recover(error, self._procs):
                raise
            self._error = error
        else:
            self.done += counts and self._error is None

    # ---- saves ------------------------------------------------------------------------------------------------------

    def _save(self) -> None:
        """Begin a save, unless the last is of the same batch. Raises: the error of what was done since the last."""
        if self._asked == self.done:
            return
        self._tensors.check()
        self._finish_save()
        self._asked = self.done
        try:
            content = {**self._state, "stream": self._stream}
            self._pending = begin_save(self._folder, None, content, step=self.done, keep=KEPT).written
            if self._last is None:
                self._finish_save()
        except Exception as error:
            self._tell_failed(error)

    def _finish_save(self) -> None:
        """Wait for the save that is being written, and tell a failure. Raises: WorkerLost, and as `_tell_failed`."""
        if (pending := self._pending) is None:
            return
        while not pending.wait(LOOK_S):
            if lost := self._procs._mesh.lost:  # it ends when the process groups are formed again
                raise WorkerLost.of(lost.values())
        self._pending = None
        try:
            self._last, self._setbacks = pending.get(), 0
        except Exception as error:
            self._tell_failed(error)

    def _tell_failed(self, error: Exception) -> None:
        """Tell why a save has failed. Raises: the error of the first save, and one from which to recover."""
        if self._last is None or can_recover(error, self._procs):
            raise error
        why = str(error).partition("\n")[0]
        print(f"elastic: the save of batch {self._asked} failed ({why}); that of batch {self._last.step:.0f} stays")

    # ---- recovery ---------------------------------------------------------------------------------------------------

    def _recover(self, error: Exception) -> None:
        """Set the mesh, the state and the stream back to the last save; a further failure is noted."""
        if self._last is None:
            raise error  # of the first save: all is as it was
        at = self.done
        self._failures = self._failures + 1 if at == self._failed else 1
        self._failed = at
        self._setbacks += 1
        if self._failures >= FAILURES or self._setbacks >= SETBACKS:
            raise error
        loss = describe_loss(error, self._procs)
        try:
            self._procs, how = recover(self._procs, self._min_ranks, self._within_s)
            for mesh in self._meshes:
                if is_renumbered(mesh.procs):
                    mesh.follow(self._procs)
            self._finish_save()  # a rank that is new has ended it
            self._tensors.renew()
            restored = {**self._state, "stream": self._stream}
            restore(self._last.path, restored)
            self._state.update({name: restored[name] for name in self._state})  # numbers have no place of their own
        except KeyboardInterrupt:
            back = f"meshbook.restore({self._folder!r}, state)"
            print(f"elastic: interrupted before the state was that of a save, to which this brings it: {back}")
            raise
        except Exception as again:
            if not can_recover(again, self._procs):
                raise
            self._error = again
            return
        self._items = None
        self.done = self._asked = int(self._last.step or 0)
        self.recoveries += 1
        count = at - self.done
        print(
            f"elastic: {loss} at batch {at}; {how}, back to the save of batch {self.done}"
            + (f", repeating {count} batch{'es' if count > 1 else ''}" if count else "")
        )
