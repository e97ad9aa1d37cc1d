"""The operations of one mesh on their way to its ranks: numbered, in batches, a bounded number of batches ahead.

    operation ──> batch ──256 of them, or somebody asks for a value──> one call of all ranks ──> RankTensors.run

Nothing is waited for until a value is needed, so failures come late: each result that could not be made remembers why,
and the line of the notebook that asked for it; who needs it is told then. Tensors that nobody refers to any more are
freed by number, with the next batch.
"""

from __future__ import annotations

import contextlib
import itertools
import sys
import threading
from collections import deque
from collections.abc import Collection, Mapping, Sequence
from typing import Any, ClassVar, NamedTuple, Protocol

import torch

from meshbook.concurrency.future import Future
from meshbook.errors import CallFailed, CallTimeout, MeshError
from meshbook.mesh.proc_mesh import ProcMesh
from meshbook.shape.value_mesh import ValueMesh
from meshbook.tensors import anomalies, rank_tensors
from meshbook.tensors.issued_lines import CodeLine, for_ranks, line_of_caller, name_code_line
from meshbook.tensors.operations import (
    NewOutput,
    OperationBatch,
    OperationFailed,
    Recording,
    Replay,
    Template,
    TensorId,
)

BATCH_USES = 256
BATCHES_AHEAD = 16
"""The controller is at most so far ahead of the ranks."""
HANG_NOTE_S = 10.0
"""A wait that takes longer says who holds the ranks up."""


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


class _Issued(NamedTuple):
    """An operation, as long as it may fail."""

    operator: str
    place: CodeLine
    results: Sequence[TensorId]
    written: Sequence[TensorId] = ()


class _Underway(NamedTuple):
    """A batch, or a recorded step, that the ranks have been sent."""

    future: Future[ValueMesh[Any]]
    issued: Sequence[tuple[Any, ...]]
    names: Mapping[TensorId, TensorId] = {}
    """What the tensors of a recorded step are called this time."""
    step: RepeatedStep | None = None
    turn: int = 0
    origin: Handle | None = None
    """A tensor of another mesh that its result is made of."""


class RepeatedStep(Protocol):
    """A recorded step."""

    recording: Recording
    issued: Sequence[tuple[Any, ...]]
    """The fields of an `_Issued` for each use."""
    captured: Sequence[TensorId]
    """What it reads that was there before."""
    left: Sequence[TensorId]
    """What it leaves behind."""

    def undo(self) -> None:
        """The ranks have not done the last one."""


class Recorder(Protocol):
    """Is told what happens while a step is recorded."""

    def note(self, stream: OpStream, template: Template, use: tuple[Any, ...], issued: tuple[Any, ...]) -> None:
        """An operation."""

    def note_put(self, method: str, number: TensorId, args: Sequence[Any]) -> None:
        """A tensor that ranks are given."""

    def note_optimizer(self, optimizer: torch.optim.Optimizer, pairs: Sequence[tuple[TensorId, TensorId]]) -> None:
        """It is about to step. pairs: of gradients and their parameters."""

    def refuse(self, why: str) -> None:
        """The step does what cannot be repeated."""


class OpStream:
    """Of one mesh. Operations are issued by one thread at a time."""

    recorder: ClassVar[Recorder | None] = None
    """Of the step that is being recorded, on whichever mesh."""

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

        self._told_steps: set[TensorId] = set()
        self._was_interrupted = False
        """Whether it is not known yet what an interrupt has left undone."""
        self._undecided: _Underway | None = None
        """A recorded step of which nobody knows whether the ranks have done it, until they can be asked."""
        self._step_failed: MeshError | None = None
        """Of a recorded step whose failure nobody was told of yet."""
        self.anomaly: MeshError | None = None
        procs.call_before_calls(self._before_call)
        anomalies.streams.add(self)

    def new_number(self) -> TensorId:
        return next(self._numbers)

    def new_numbers(self, count: int) -> range:
        """So many at once."""
        with self._lock:
            first = next(self._numbers)
            self._numbers = itertools.count(first + count)
            return range(first, first + count)

    def new_number_aside(self) -> TensorId:
        """One for a thread that issues no operations."""
        with self._lock:
            return next(self._numbers)

    def issue(
        self,
        template: Template,
        tensors: Sequence[TensorId],
        numbers: Sequence[float],
        results: Sequence[TensorId],
        written: Sequence[TensorId] = (),
    ) -> None:
        """Have the ranks do an operation. Raises: the error of a tensor that it needs and that could not be made."""
        if self._failed or self._unsure or self._was_interrupted:
            self.check(tensors)
        with self._lock:
            if template.number not in self._told:
                self._told.add(template.number)
                self._templates.append(template)
            self._uses.append(use := (template.number, tensors, numbers, results))
            self._issued.append(issued := (template.operator, line_of_caller(), results, written))
        if self.recorder is not None:
            self.recorder.note(self, template, use, issued)
        if len(self._uses) >= BATCH_USES:
            self.flush()

    def check(self, tensors: Sequence[TensorId]) -> None:
        """Raises: the error of a tensor that could not be made."""
        if self._was_interrupted:
            self._was_interrupted = False
            while self._underway:
                self._settle()
        for number in tensors:
            if (error := self._failed.get(number) or self._unsure.get(number)) is not None:
                if error is self._step_failed:
                    self._step_failed = None
                raise error

    def why_not(self, number: TensorId) -> MeshError | None:
        """Why a tensor could not be made, if it could not; waits until that is known."""
        self.settle()
        return self._failed.get(number)

    def flush(self) -> None:
        """Send what was issued so far; where the ranks are far behind, wait for them."""
        self._send_issued()
        while not self._sending and len(self._underway) > BATCHES_AHEAD:
            self._settle()

    def _send_issued(self) -> None:
        with self._lock:
            if self._sending or not (self._uses or self.freed):
                return  # the first where sending a batch is a call that would send what was issued before it
            lines = for_ranks(each[1] for each in self._issued)
            batch = OperationBatch(self._templates, self._uses, lines, self._take_freed(), anomalies.hunted)
            issued, self._templates, self._uses, self._issued = self._issued, [], [], []
            self._underway.append(_Underway(self.send("run", batch), issued))

    def replay(
        self,
        step: RepeatedStep,
        inputs: Sequence[TensorId],
        numbers: dict[int, Sequence[float]],
        results: Sequence[TensorId],
    ) -> None:
        """Have the ranks do a recorded step again, for which `check_step` has found nothing."""
        recording, turn = step.recording, self.new_number()
        if self._uses:
            self.flush()
        with self._lock:
            unknown = None if recording.number in self._told_steps else recording
            replay = Replay(
                recording.number, turn, unknown, inputs, numbers, results, self._take_freed(), anomalies.hunted
            )
            names = dict(zip((*recording.inputs, *recording.results), (*inputs, *results), strict=True))
            self._underway.append(_Underway(self.send("replay", replay), step.issued, names, step, turn))
            self._told_steps.add(recording.number)
        while len(self._underway) > BATCHES_AHEAD:
            self._settle()

    def check_step(self, step: RepeatedStep, inputs: Sequence[TensorId], *, in_turn: bool) -> None:
        """Whether a recorded step can be done again; in_turn: when the last one is done, so that it can be undone.

        Raises: the error of a tensor that it needs, or of the last step if nobody was told.
        """
        while in_turn and self._underway:
            self._settle()
        if self._failed or self._unsure:
            self.check([*inputs, *step.captured])
        if (error := self._step_failed) is not None:
            self._step_failed = None
            raise error

    def put(self, method: str, number: TensorId, *args: Any) -> None:
        """Have the ranks make a tensor, by a method of `RankTensors` that takes its number first."""
        self.flush()
        if self.recorder is not None:
            self.recorder.note_put(method, number, args)
        self.follow(method, (number,), self.send(method, number, *args))

    def give(self, made: Sequence[TensorId], sent: Sequence[tuple[ProcMesh, Any]], line: CodeLine) -> list[Future[Any]]:
        """Have ranks take tensors of this process; any thread may, it does not wait for ranks.

        sent: which ranks are given what, as `RankTensors.take` says. Returns: done when they have come as far.
        """
        with self._lock:
            self._sending = True
            try:
                given = [procs.execute(rank_tensors.ask, self.name, "take", parts) for procs, parts in sent]
            finally:
                self._sending = False
            for number in made:
                self._failed.pop(number, None)
            self._underway += [_Underway(future, [_Issued("distribute", line, made)]) for future in given]
        return given

    def give_up(self, made: Sequence[TensorId], error: MeshError) -> None:
        """Tensors could not be made."""
        self._failed.update(dict.fromkeys(made, error))

    def follow(
        self, operation: str, made: Sequence[TensorId], future: Future[ValueMesh[Any]], origin: Handle | None = None
    ) -> None:
        """Count a call that makes tensors, and tells if it could not, to what is under way. origin: made of which."""
        self._underway.append(_Underway(future, [_Issued(operation, line_of_caller(), made)], origin=origin))

    def fetch(self, method: str, number: TensorId) -> Any:
        """What a method of `RankTensors` says of a tensor, on the first rank. Raises: the error of what it needs."""
        self.check([number])
        self.flush()
        asked = self.ask(method, number)
        self.settle()
        self.check([number])
        return next(iter(asked.get().values()))

    def settle(self) -> None:
        """Wait until all that was issued has been done, or has failed. Raises: TensorError of a hunt's find."""
        self.flush()
        while self._underway:
            self._settle()
        if self.anomaly is not None:
            found, self.anomaly = self.anomaly, None
            raise found

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
        self._told_steps.clear()
        self._step_failed = None
        last, self._undecided = self._undecided, None
        if last is not None and last.step is not None and last.turn not in self.ask("stepped").get().values():
            last.step.undo()

    def ask(self, method: str, *args: Any) -> Future[ValueMesh[Any]]:
        place = line_of_caller() if method not in ("run", "replay") else None  # what is in those has its own
        ((_, place),) = for_ranks([place])
        return self.procs.execute(rank_tensors.ask_at, place, self.name, method, *args)

    def send(self, method: str, *args: Any) -> Future[ValueMesh[Any]]:
        """As `ask`, which is a call that would send what was issued before it."""
        with self._lock:
            self._sending = True
            try:
                return self.ask(method, *args)
            finally:
                self._sending = False

    def _before_call(self) -> None:
        sends = any(isinstance(stream, OpStream) and stream._sending for stream in anomalies.streams)
        if self.recorder is not None and not sends:
            self.recorder.refuse("it asks the ranks for a value, or calls them")
        self._send_issued()  # calls of other threads come here as well: one thread alone settles

    def _take_freed(self) -> list[TensorId]:
        freed, self.freed = self.freed, []
        for number in freed if self._failed or self._unsure else ():
            self._failed.pop(number, None)
            self._unsure.pop(number, None)
        return freed

    def _settle(self) -> None:
        """Wait for the oldest batch, and note what failed in it."""
        future, issued, names, step, _, origin = self._underway[0]
        try:
            failed = {number: why for each in self._await(future).values() for number, why in (each or {}).items()}
        except KeyboardInterrupt:
            self._was_interrupted = True
            raise
        except MeshError as error:
            self._note_lost(error, self._underway.popleft())
            return
        self._underway.popleft()
        if step is not None:
            for number in step.left if self._failed else ():
                self._failed.pop(number, None)
        if (anomaly := failed.pop(anomalies.FOUND, "")) and self.anomaly is None:
            index, _, why = anomaly.partition(" ")
            at = _Issued._make(issued[int(index)])
            self.anomaly = TensorError(at.operator, name_code_line(at.place), why)
        known = origin.stream.why_not(origin.number) if failed and origin is not None else None
        for each in map(_Issued._make, issued if failed else ()):
            why = next((failed[number] for number in each.results if number in failed), "")
            if why:
                told = known or TensorError(each.operator, name_code_line(each.place), why)
                self._failed.update(dict.fromkeys(_as_named(each.results, names), told))

    def _await(self, future: Future[ValueMesh[Any]]) -> ValueMesh[Any]:
        """What the ranks answer; where some hold others up meanwhile, who does is said once."""
        with contextlib.suppress(CallTimeout):
            return future.get(HANG_NOTE_S)
        with contextlib.suppress(MeshError):
            if (verdict := self.procs.stacks().verdict) is not None:
                print(f"mesh tensors wait for this: {verdict.text}", file=sys.stderr)
        return future.get()

    def _note_lost(self, error: MeshError, lost: _Underway) -> None:
        """A batch was not done to its end: the results of the first operation that failed, and of all behind it.

        In a recorded step nobody goes past the second wait in a row unless all have passed the first: where a rank
        failed before, nothing behind was written.
        """
        self._told.clear()  # a rank that was interrupted before it began has not read what it was sent
        self._told_steps.clear()
        begin, cause = 0, error
        causes = [f.load() for f in error.failures] if isinstance(error, CallFailed) else []
        found = [each for each in causes if isinstance(each, OperationFailed)]
        issued = [_Issued._make(each) for each in lost.issued]
        if found:
            begin = min(each.index for each in found)
            first = next((e for e in found if "GroupAborted" not in e.why), found[0])
            at = issued[first.index]
            cause = TensorError(at.operator, name_code_line(at.place), first.why)
        elif issued and isinstance(error, CallFailed) and any(f.ename == "KeyboardInterrupt" for f in error.failures):
            cause = TensorError(issued[0].operator, name_code_line(issued[0].place), str(error))
        waits = [index for index, each in enumerate(issued) if each.operator == WAITS]
        sure = next((index for index in waits[1::2] if found and index > begin), len(issued))
        for index, each in enumerate(issued[begin:], begin):
            self._failed.update(dict.fromkeys(_as_named(each.results, lost.names), cause))
            if index < sure:
                self._unsure.update(dict.fromkeys(_as_named(each.written, lost.names), cause))
        if lost.step is not None and waits:
            self._step_failed = cause
            if sure == waits[1]:
                lost.step.undo()
            elif not found:
                self._undecided = lost


WAITS = "the wait before a step of an optimizer"


def _as_named(numbers: Sequence[TensorId], names: Mapping[TensorId, TensorId]) -> list[TensorId]:
    """Without those that are within a recorded step alone."""
    return [named for number in numbers if (named := names.get(number, number)) > 0]
