"""`stream`: batches of data from this process to the ranks, while these work on earlier ones.

    source ──read──> tensors here ──sent──> parts on the ranks ──next()──> the loop
             the stream's own thread, prefetch batches ahead      the thread of the loop

A batch counts from the beginning of its reading until it was given by ``next`` and the ranks have come as far as it: at
most ``prefetch`` do, then the thread waits. It sends by `OpStream.give`, which waits for no rank and which the loop's
own operations may meet; all that waits for ranks, or heals them, stays with the loop's thread. Of the batch given last,
and of batches sent ahead, the tensors here are kept, so that a repair can send them again under the same numbers.
"""

from __future__ import annotations

import copy
import signal
import threading
import weakref
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, Generic, NamedTuple, TypeVar, cast

import torch
from torch.distributed.tensor import Placement

from meshbook.concurrency.background import hidden_thread
from meshbook.concurrency.future import Future
from meshbook.concurrency.interrupts import held_back
from meshbook.errors import MeshError, UsageError
from meshbook.mesh.proc_mesh import ProcMesh
from meshbook.mesh.proc_view import call_after_repairs
from meshbook.mesh.prompt import is_notebook
from meshbook.tensors.data.batches import Layouts, SpecStructure, is_arrow, read_batches
from meshbook.tensors.handles.distributed_mesh import Mesh, mesh_of
from meshbook.tensors.handles.factories import Placing, send_parts
from meshbook.tensors.messages.issued_lines import CodeLine, line_of_caller
from meshbook.tensors.sending.op_settling import Handle
from meshbook.tensors.sending.op_stream import OpStream

T = TypeVar("T")

CLOSE_S = 5.0
"""The time that `BatchStream.close` waits for a source that is being read; its thread ends after that item."""


def stream(
    source: Iterable[T],
    mesh: Mesh | ProcMesh,
    sharding_spec: SpecStructure = None,
    *,
    placements: Sequence[Placement] | None = None,
    prefetch: int = 2,
    progress: bool = False,
) -> BatchStream[T]:
    """Return the items of ``source`` with their tensors laid out over a mesh, each rank with its own rows.

    source: an iterable of tensors, NumPy arrays, Arrow data, or tuples, lists, mappings and dataclasses of them; or
    an object that gives Arrow batches, such as a data frame or a relation. sharding_spec: for all tensors, or a
    structure of specs; by default the first axis of the mesh cuts the first dim. Dims that a tensor lacks are left out.
    prefetch: so many batches are read and sent ahead, by a thread; 0: none, and no thread. progress: show a bar.
    Raises: UnknownAxisError; UsageError for data that does not fit. The source's own errors are raised by ``next``.
    """
    mesh, line = mesh_of(mesh), line_of_caller()
    return BatchStream(source, mesh, Layouts(mesh, sharding_spec, placements), prefetch, progress, line)


class _End(NamedTuple):
    """The end of a source, perhaps because of an error."""

    error: BaseException | None


class _SentBatch:
    """An item on its way."""

    def __init__(self, item: Any, tensors: Sequence[Placing], handles: Sequence[Handle], after: Any) -> None:
        """item: with mesh tensors, until it is given. after: the state of the source behind it."""
        self.item, self.after = item, after
        self._tensors = [(weakref.ref(handle), each) for handle, each in zip(handles, tensors, strict=True)]
        self._calls: Sequence[Future[Any]] = ()
        self.is_sent = False
        self.error: MeshError | None = None
        """The error for which it could not be sent."""

    @property
    def is_reached(self) -> bool:
        """Whether all ranks have come as far."""
        return all(call.done() for call in self._calls)

    def send(self, mesh: Mesh, line: CodeLine, on_reached: Callable[[object], None]) -> None:
        """Send the tensors whose handles are alive, also once more."""
        living = [each for handle, each in self._tensors if handle() is not None]
        try:
            self._calls = send_parts(living, mesh, line)
        except MeshError as error:
            self.is_sent, self.error = False, error
            mesh.stream.give_up([each.number for each in living], error)
        else:
            self.is_sent, self.error = True, None
        for call in self._calls:
            call.add_done_callback(on_reached)


class _Feed:
    """The state that a stream shares with its thread, which does not hold the stream: its end is the end of both."""

    def __init__(
        self, source: Any, items: Iterator[Any], mesh: Mesh, layouts: Layouts, prefetch: int, line: CodeLine
    ) -> None:
        """items: of the source, from where it is."""
        self._items, self._mesh, self._layouts, self._prefetch, self._line = items, mesh, layouts, prefetch, line
        self._source = source
        self.position: Any = None
        """The state of the source behind the batch given last."""
        self._changed = threading.Condition()
        self._sending = threading.Lock()
        """A lock to send a batch: in a repair another thread does."""
        self._ready: deque[_SentBatch | _End] = deque()
        self._given: deque[_SentBatch] = deque()
        """The batches that the ranks may not have reached, and the last one."""
        self._is_closed = False
        self.thread: threading.Thread | None = None

    # ---- whoever reads: the thread, or that of the loop ------------------------------------------------------------

    def _run(self) -> None:
        signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})  # it must wake the main thread
        try:
            while self._wait_for_room():
                self._read_one()
        except BaseException as error:  # in sending, of which the loop is told as well
            self._add(_End(error))
        finally:
            self._items = iter(())  # a generator ends here

    def _wait_for_room(self) -> bool:
        """Wait until a batch may be read; return whether more is to be read."""
        with self._changed:
            while not self._is_over and self._unreached >= max(self._prefetch, 1):
                self._changed.wait()
            return not self._is_over

    @property
    def _unreached(self) -> int:
        return len(self._ready) + sum(not each.is_reached for each in self._given)

    @property
    def _is_over(self) -> bool:
        return self._is_closed or (bool(self._ready) and isinstance(self._ready[-1], _End))

    def _read_one(self) -> None:
        try:
            found: _SentBatch | _End = self._lay_out(next(self._items))
        except StopIteration:
            found = _End(None)
        except BaseException as error:
            found = _End(error)
        self._add(found)  # before it is sent: an interrupt meanwhile loses nothing
        if isinstance(found, _SentBatch):
            self._send(found)

    def _lay_out(self, item: Any) -> _SentBatch:
        tensors: list[Placing] = []
        handles: list[Handle] = []

        def lay(tensor: torch.Tensor, placements: tuple[Placement, ...]) -> torch.Tensor:
            placed = Placing.of(tensor, self._mesh, placements)
            made = placed.mesh_tensor(self._mesh)
            tensors.append(placed)
            handles.append(made._handle)
            return made

        laid = self._layouts.lay_out(item, lay)
        if not tensors:
            raise UsageError(f"there is no tensor in a batch of the source: {item!r:.80}")
        return _SentBatch(laid, tensors, handles, _state_of(self._source))

    def _add(self, found: _SentBatch | _End) -> None:
        with self._changed:
            if not self._is_closed:
                self._ready.append(found)
            self._changed.notify_all()

    def _send(self, batch: _SentBatch) -> None:
        with self._sending:
            if not batch.is_sent and not self._is_closed:
                batch.send(self._mesh, self._line, self._on_reached)

    def _on_reached(self, _: object) -> None:
        with self._changed:
            self._changed.notify_all()

    # ---- the thread of the loop -----------------------------------------------------------------------------------

    def take(self) -> Any:
        """Return the next item.

        An item that cannot be sent since a rank has ended is given all the same: it fails where it is used, as all
        else, and is whole after the repair. The next call tells the error.
        Raises: StopIteration, or the error of the source; a MeshError, and then nothing is taken.
        """
        if self._given and self._given[-1].error is not None:
            self._send(self._given[-1])
            if (error := self._given[-1].error) is not None:
                raise error
        if not self._mesh.procs.lost:
            self._mesh.stream.flush()  # what was done with earlier batches goes before; else it fails where it is used
        if self.thread is None:
            self._begin()
        with self._changed:
            while not self._ready and not self._is_closed:
                self._changed.wait()
            found = _End(None) if self._is_closed else self._ready[0]
        if isinstance(found, _End):
            self.close()
            raise found.error or StopIteration
        self._send(found)
        if found.error is not None and not self._mesh.procs.lost:
            raise found.error
        with self._changed:
            item, self.position = found.item, found.after
            self._given = deque([*(each for each in self._given if not each.is_reached), found])
            self._ready.popleft()
            found.item = None  # whoever has the item alone keeps its tensors on the ranks
            self._changed.notify_all()
        return item

    def _begin(self) -> None:
        """Read in this thread: all if it is the only one, else the first, as samplers of torch draw their seed then."""
        if not self._ready and self._wait_for_room():
            self._read_one()
        if self._prefetch and not self._is_over:
            with held_back():  # one that has not begun cannot be waited for
                self.thread = hidden_thread(self._run, "meshbook.stream")
                self.thread.start()

    def send_again(self) -> None:
        """Send the batch given last, and those sent ahead, to all ranks again after a repair."""
        with self._sending:
            self._mesh.stream.settle()
            for batch in (*self._given, *tuple(self._ready)):
                if isinstance(batch, _SentBatch):
                    batch.send(self._mesh, self._line, self._on_reached)

    def close(self) -> None:
        """Read no more; the thread ends by itself."""
        with self._changed:
            self._is_closed = True
            self._ready.clear()
            self._given.clear()
            self._changed.notify_all()
        if self.thread is None:
            self._items = iter(())


class BatchStream(Generic[T]):
    """Batches on a mesh, one after the other; see `stream`. It ends with its source, by `close`, or when collected."""

    def __init__(
        self, source: Iterable[T], mesh: Mesh, layouts: Layouts, prefetch: int, progress: bool, line: CodeLine
    ) -> None:
        """line: of the notebook, for errors."""
        if prefetch < 0:
            raise UsageError(f"prefetch={prefetch}: a stream reads 0 batches ahead, or more")
        self.mesh = mesh
        self._length = None if is_arrow(source) else _length_of(source)
        self._bar = _bar(self._length) if progress else None
        self._source, self._about = source, (mesh, layouts, prefetch, line)
        self._given = 0
        start = _state_of(source)
        self._read(_items_of(source), start)

    def _read(self, items: Iterator[Any], position: Any) -> None:
        self._feed = _Feed(self._source, items, *self._about)
        self._feed.position = position
        self._end = weakref.finalize(self, self._feed.close)
        call_after_repairs(self.mesh.procs, self._feed.send_again)

    def __iter__(self) -> BatchStream[T]:
        return self

    def __next__(self) -> T:
        if OpStream.recorder is not None:
            OpStream.recorder.refuse("it takes a batch from a stream: give it the batch")
        try:
            item = self._feed.take()
        except StopIteration:
            self.close()
            raise
        self._given += 1
        if self._bar is not None:
            self._bar.update()
        return cast("T", item)

    def __len__(self) -> int:
        """Return the number of batches in the source. Raises: TypeError if it does not say."""
        if self._length is None:
            raise TypeError("the source of this stream does not say how many batches it has")
        return self._length

    def state_dict(self) -> dict[str, Any]:
        """Return the position behind the batch given last, for `load_state_dict`.

        Raises: UsageError unless the source is a list or another sequence, or has these two methods itself, as
        torchdata's StatefulDataLoader.
        """
        if not isinstance(self._source, Sequence) and not is_stateful(self._source):
            raise UsageError(
                f"a stream of {type(self._source).__name__} cannot be set back, since that has no state_dict and "
                "load_state_dict: use torchdata's StatefulDataLoader, a list of batches, or give it these methods"
            )
        return {"batches": self._given, "source": self._feed.position}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on behind the batch at which `state_dict` was called; what was read ahead is dropped."""
        self.state_dict()  # which raises if that cannot be
        self._end()
        while self._feed.thread is not None and self._feed.thread.is_alive():
            self._feed.thread.join(CLOSE_S)  # it reads the source, which is to be set back
        self._given, position = state["batches"], copy.deepcopy(state["source"])
        if isinstance(self._source, Sequence):
            items: Iterator[Any] = map(self._source.__getitem__, range(self._given, len(self._source)))
        else:
            cast("Any", self._source).load_state_dict(state["source"])
            items = iter(cast("Any", self._source))
        self._read(items, position)
        if self._bar is not None:
            self._bar.n = self._given
            self._bar.refresh()

    def close(self) -> None:
        """Read no more, and end the thread, at the latest when the source has given the item being read."""
        self._end()
        if (thread := self._feed.thread) is not None:
            thread.join(CLOSE_S)
        if self._bar is not None:
            self._bar.close()

    def __enter__(self) -> BatchStream[T]:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()


def _items_of(source: Any) -> Iterator[Any]:
    if is_arrow(source):
        return read_batches(source)
    if not hasattr(source, "__iter__") and hasattr(source, "collect"):  # what is lazy fails once it is asked
        raise UsageError(f"{type(source).__name__} has no rows yet: give what its collect() makes")
    try:
        return iter(source)
    except TypeError as error:
        raise UsageError(f"{type(source).__name__} cannot be read batch by batch: give an iterable") from error


def is_stateful(source: object) -> bool:
    """Whether a source can be set back to a position."""
    return callable(getattr(source, "state_dict", None)) and callable(getattr(source, "load_state_dict", None))


def _state_of(source: Any) -> Any:
    """Return a copy of the source's state; None for a source that has none."""
    return copy.deepcopy(source.state_dict()) if is_stateful(source) else None


def _length_of(source: object) -> int | None:
    try:
        return len(source)  # type: ignore[arg-type]
    except TypeError:  # it has none, or is of a class that has one at times
        return None


def _bar(total: int | None) -> Any:
    """Return tqdm's bar: a widget in a notebook, a line of text in a script.

    tqdm.auto decides once, when it is first imported, and by whether anyone has imported a kernel: so it is asked in a
    kernel alone.
    """
    try:
        if is_notebook():
            from tqdm.auto import tqdm  # type: ignore[import-untyped]
        else:
            from tqdm.std import tqdm  # type: ignore[import-untyped]
    except ImportError as error:
        raise UsageError("progress=True shows a bar of tqdm, which is not installed: pip install tqdm") from error
    return tqdm(total=total, unit="batch")
