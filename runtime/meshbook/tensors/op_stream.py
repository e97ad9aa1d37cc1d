"""The operations of one mesh on their way to its ranks: numbered, in batches, a bounded number of batches ahead.

    operation ──> batch ──256 of them, or somebody asks for a value──> one call of all ranks ──> RankTensors.run

Nothing is waited for until a value is needed, so failures come late: each result that could not be made remembers why,
and the line of the notebook that asked for it; who needs it is told then. Tensors that nobody refers to any more are
freed by number, with the next batch.
"""

from __future__ import annotations

import itertools
import sys
import threading
from collections import deque
from collections.abc import Collection, Mapping, Sequence
from types import FrameType
from typing import Any, NamedTuple, TypeAlias

import torch

from meshbook.concurrency.future import Future
from meshbook.errors import CallFailed, MeshError
from meshbook.mesh.proc_mesh import ProcMesh
from meshbook.shape.value_mesh import ValueMesh
from meshbook.source.cells import name_line
from meshbook.source.location import PACKAGE
from meshbook.tensors import rank_tensors
from meshbook.tensors.operations import NewOutput, OperationBatch, OperationFailed, Template, TensorId

BATCH_USES = 256
BATCHES_AHEAD = 16
"""The controller is at most so far ahead of the ranks."""


class TensorError(MeshError):
    """An operation on mesh tensors failed; told where its result, or what was made of it, is used."""

    def __init__(self, operation: str, place: str, why: str) -> None:
        """place: the line that asked for it."""
        super().__init__(operation, place, why)
        self.operation, self.place, self.why = operation, place, why

    def __str__(self) -> str:
        where = f" ({self.place})" if self.place else ""
        return f"{self.operation}{where} failed: {self.why}"


class Handle:
    """What keeps a tensor on the ranks."""

    __slots__ = ("__weakref__", "number", "output", "stream")

    def __init__(self, number: TensorId, stream: OpStream, output: NewOutput) -> None:
        """output: what it is, which is a part of the signature of operations that read it."""
        self.number, self.stream, self.output = number, stream, output

    def __del__(self) -> None:
        if (stream := getattr(self, "stream", None)) is not None:  # torch.compile makes such an object of no init
            stream.freed.append(self.number)


CodeLine: TypeAlias = tuple[str, int] | None
"""A line: the name of its file, and its number there."""


class _Issued(NamedTuple):
    """An operation, as long as it may fail."""

    operator: str
    place: CodeLine
    results: Sequence[TensorId]
    written: Sequence[TensorId] = ()


class _Underway(NamedTuple):
    """A batch that the ranks have been sent."""

    future: Future[ValueMesh[Any]]
    issued: Sequence[tuple[Any, ...]]
    origin: Handle | None = None
    """A tensor of another mesh that its result is made of."""


class OpStream:
    """Of one mesh. Operations are issued by one thread at a time."""

    def __init__(self, procs: ProcMesh, name: str) -> None:
        self.procs, self.name = procs, name
        self._lock = threading.RLock()
        """Held to note or send an operation: calls of other threads send what was issued, too."""
        self._sending = False
        self.freed: list[TensorId] = []
        self._numbers = itertools.count(1)
        self._told: set[int] = set()
        """Templates that the ranks know."""
        self._templates: list[Template] = []
        self._uses: list[tuple[Any, ...]] = []
        self._issued: list[tuple[Any, ...]] = []
        """The fields of an `_Issued` each."""
        self._underway: deque[_Underway] = deque()
        self._failed: dict[TensorId, MeshError] = {}
        self._unsure: dict[TensorId, MeshError] = {}
        """Tensors that were written to by what failed: on some ranks perhaps, on others not."""

        procs.call_before_calls(self.flush)

    def new_number(self) -> TensorId:
        return next(self._numbers)

    def new_numbers(self, count: int) -> range:
        """So many at once."""
        first = next(self._numbers)
        self._numbers = itertools.count(first + count)
        return range(first, first + count)

    def issue(
        self,
        template: Template,
        tensors: Sequence[TensorId],
        numbers: Sequence[float],
        results: Sequence[TensorId],
        written: Sequence[TensorId] = (),
    ) -> None:
        """Have the ranks do an operation. Raises: the error of a tensor that it needs and that could not be made."""
        if self._failed or self._unsure:
            self.check(tensors)
        with self._lock:
            if template.number not in self._told:
                self._told.add(template.number)
                self._templates.append(template)
            self._uses.append((template.number, tensors, numbers, results))
            self._issued.append((template.operator, _line_of_caller(), results, written))
        if len(self._uses) >= BATCH_USES:
            self.flush()

    def check(self, tensors: Sequence[TensorId]) -> None:
        """Raises: the error of a tensor that could not be made."""
        for number in tensors:
            if (error := self._failed.get(number) or self._unsure.get(number)) is not None:
                raise error

    def why_not(self, number: TensorId) -> MeshError | None:
        """Why a tensor could not be made, if it could not; waits until that is known."""
        self.settle()
        return self._failed.get(number)

    def flush(self) -> None:
        """Send what was issued so far."""
        with self._lock:
            if self._sending or not (self._uses or self.freed):
                return  # the first where sending a batch is a call that would send what was issued before it
            freed, self.freed = self.freed, []
            for number in freed:
                self._failed.pop(number, None)
                self._unsure.pop(number, None)
            batch = OperationBatch(self._templates, self._uses, freed)
            issued, self._templates, self._uses, self._issued = self._issued, [], [], []
            self._sending = True
            try:
                self._underway.append(_Underway(self.ask("run", batch), issued))
            finally:
                self._sending = False
        while len(self._underway) > BATCHES_AHEAD:
            self._settle()

    def put(self, method: str, number: TensorId, *args: Any) -> None:
        """Have the ranks make a tensor, by a method of `RankTensors` that takes its number first."""
        self.flush()
        self.follow(method, number, self.ask(method, number, *args))

    def follow(
        self, operation: str, number: TensorId, future: Future[ValueMesh[Any]], origin: Handle | None = None
    ) -> None:
        """Count a call that makes a tensor, and tells if it could not, to what is under way. origin: made of which."""
        self._underway.append(_Underway(future, [_Issued(operation, _line_of_caller(), (number,))], origin))

    def fetch(self, method: str, number: TensorId) -> Any:
        """What a method of `RankTensors` says of a tensor, on the first rank. Raises: the error of what it needs."""
        self.check([number])
        self.flush()
        asked = self.ask(method, number)
        self.settle()
        self.check([number])
        return next(iter(asked.get().values()))

    def settle(self) -> None:
        """Wait until all that was issued has been done, or has failed."""
        self.flush()
        while self._underway:
            self._settle()

    def renew(self, whole: Collection[TensorId], lost: Mapping[TensorId, MeshError]) -> None:
        """After a repair: what is ``whole`` again, equal on the ranks that hold the same part, and what is gone.

        What was made while a rank died is whole where nothing else has failed: the others went on as far as they could.
        """
        for number in whole:
            if not isinstance(self._failed.get(number), TensorError):
                self._failed.pop(number, None)
        self._failed.update(lost)
        self._unsure.clear()
        self._told.clear()  # by new ranks

    def ask(self, method: str, *args: Any) -> Future[ValueMesh[Any]]:
        return self.procs.execute(rank_tensors.ask, self.name, method, *args)

    def _settle(self) -> None:
        """Wait for the oldest batch, and note what failed in it."""
        future, issued, origin = self._underway[0]
        try:
            failed = {number: why for each in future.get().values() for number, why in (each or {}).items()}
        except KeyboardInterrupt:
            raise
        except MeshError as error:
            self._underway.popleft()
            self._note_lost(error, issued)
            return
        self._underway.popleft()
        known = origin.stream.why_not(origin.number) if failed and origin is not None else None
        for each in map(_Issued._make, issued if failed else ()):
            for number in each.results:
                if number in failed:
                    self._failed[number] = known or TensorError(each.operator, _name(each.place), failed[number])

    def _note_lost(self, error: MeshError, issued: Sequence[tuple[Any, ...]]) -> None:
        """A batch was not done to its end: the results of the first operation that failed, and of all behind it."""
        begin, cause = 0, error
        causes = [f.load() for f in error.failures] if isinstance(error, CallFailed) else []
        found = [each for each in causes if isinstance(each, OperationFailed)]
        if found:
            begin = min(each.index for each in found)
            first = next((e for e in found if "GroupAborted" not in e.why), found[0])
            at = _Issued._make(issued[first.index])
            cause = TensorError(at.operator, _name(at.place), first.why)
        for each in map(_Issued._make, issued[begin:]):
            self._failed.update(dict.fromkeys(each.results, cause))
            self._unsure.update(dict.fromkeys(each.written, cause))


_SKIPPED = (PACKAGE, f"{torch.__path__[0]}/", "<frozen ")


_skipped: dict[str, bool] = {}
"""By the name of a file."""


def _line_of_caller() -> CodeLine:
    """The innermost line that is neither ours nor torch's."""
    frame: FrameType | None = sys._getframe(2)
    while frame is not None:
        name = frame.f_code.co_filename
        skipped = _skipped.get(name)
        if skipped is None:
            skipped = _skipped[name] = name.startswith(_SKIPPED)
        if not skipped:
            return name, frame.f_lineno
        frame = frame.f_back
    return None


def _name(place: CodeLine) -> str:
    return name_line(*place) or f"{place[0]}, line {place[1]}" if place else ""
