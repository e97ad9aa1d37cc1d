"""The operations of one mesh on their way to its ranks: numbered, in batches, a bounded number of batches ahead.

    operation ──> batch ──256 of them, or a value is asked for──> one call of all ranks ──> RankTensors.run

`op_settling` finds out whether sent operations were done. Tensors without a handle are freed by number, with the next
batch.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterable, Sequence
from typing import Any, ClassVar, Protocol

import torch

from meshbook.concurrency.background import peeking, refuse_in_peek
from meshbook.concurrency.future import Future
from meshbook.concurrency.interrupts import held_back
from meshbook.errors import LayoutError, MeshError
from meshbook.mesh.proc_mesh import ProcMesh
from meshbook.mesh.proc_view import call_before_calls, is_renumbered
from meshbook.mesh.rank_calls import RepeatedCall, execute_as
from meshbook.shape.value_mesh import ValueMesh
from meshbook.tensors.messages import anomalies
from meshbook.tensors.messages.issued_lines import CodeLine, NamedLine, as_named_line, for_ranks, line_of_caller
from meshbook.tensors.messages.operations import OperationBatch, Template, TensorId
from meshbook.tensors.ranks import known_meshes
from meshbook.tensors.sending.op_failures import OVERWRITING, Families, Issued, RepeatedStep, TensorError, Turn, Window
from meshbook.tensors.sending.op_settling import Handle, SentOperations, Underway

BATCH_USES = 256
BATCHES_AHEAD = 16
"""The most batches that the controller is ahead of the ranks."""
NOT_SENT = "ranks were started again before it was sent, so nobody has done it: do it again"


def _why_not_made(tensor: Handle) -> MeshError | None:
    return tensor.stream.why_not(tensor.number)


class Recorder(Protocol):
    """A listener to the operations of a step that is being recorded."""

    def note(self, stream: OpStream, template: Template, use: tuple[Any, ...], issued: tuple[Any, ...]) -> None:
        """Note an operation."""

    def note_tensors(self, tensors: Iterable[object]) -> None:
        """Note the tensors that an operation reads and makes."""

    def note_put(self, method: str, number: TensorId, args: Sequence[Any]) -> None:
        """Note a tensor that ranks are given."""

    def note_optimizer(self, optimizer: torch.optim.Optimizer, pairs: Sequence[tuple[TensorId, TensorId]]) -> None:
        """Note that an optimizer is about to step. pairs: of gradients and their parameters."""

    def refuse(self, why: str) -> None:
        """Note that the step cannot be repeated, and why."""


class OpStream(SentOperations):
    """The stream of one mesh. Any thread may issue operations; each waits for the values that it has asked for."""

    recorder: ClassVar[Recorder | None] = None
    """The recorder of the step that is being recorded, on any mesh."""

    def __init__(self, procs: ProcMesh, name: str) -> None:
        super().__init__(procs, name)
        self._sending = False
        self._unfreed: Sequence[TensorId] = ()
        """The freed tensors of which ranks could not be told."""
        self._templates: list[Template] = []
        """The templates of unsent operations that the ranks do not know."""
        self._issued: list[tuple[tuple[Any, ...], tuple[Any, ...]]] = []
        """The fields of a `Use` and of an `Issued` for each unsent operation, in one list, which nothing can tear."""
        self._are_ranks_new = False
        """Whether some were started again, and have not been told of the tensors."""
        call_before_calls(procs, self._before_call)
        anomalies.hunt.streams.add(self)

    def issue(
        self,
        template: Template,
        tensors: Sequence[TensorId],
        numbers: Sequence[float],
        results: Sequence[TensorId],
        written: Sequence[TensorId] = (),
    ) -> None:
        """Have the ranks do an operation. Raises: the error of a tensor that it needs and that could not be made."""
        if peeking:
            refuse_in_peek("an operation on mesh tensors")
        if self._was_interrupted or self._failures.exist:
            self.check(tensors, written if template.operator in OVERWRITING else ())
        with self._lock:
            if template.number not in self._told:
                self._templates.append(template)
                self._told.add(template.number)
            use = (template.number, tensors, numbers, results)
            issued = (template.operator, line_of_caller(), results, written)
            self._issued.append((use, issued))
        if self.recorder is not None:
            self.recorder.note(self, template, use, issued)
        if len(self._issued) >= BATCH_USES:
            self.flush()

    def flush(self) -> None:
        """Send the operations issued so far; where the ranks are far behind, wait for them."""
        self.send_issued()
        if len(self._underway) > BATCHES_AHEAD and not self._sending:
            self._let_catch_up()

    def _let_catch_up(self) -> None:
        """Wait until the ranks have done half of the batches, since each wait lets other processes have the caches.

        Where they have halted they go on when all that is under way has come back.
        """
        while len(self._underway) > BATCHES_AHEAD // 2 or self._halted:
            self._settle()

    def send_issued(self) -> None:
        with self._lock:
            if self._sending or self._are_ranks_new or not (self._issued or self._freed):
                return  # the first where sending a batch is a call that would send what was issued before it
            if not self._issued and is_renumbered(self.procs):
                self._unfreed = self._take_freed()
                self._free_by_base()
                return
            with held_back():  # what was sent is known to be under way
                uses, window = self._as_window()
                lines = for_ranks(each[1] for each in window.issued)
                batch = OperationBatch(
                    window.first, self._templates, uses, lines, self._take_freed(), anomalies.hunt.kind
                )
                try:
                    sent = self.send("run", batch, asked_by=as_named_line(window.issued[0][1]) if uses else None)
                except MeshError as error:
                    self._unfreed = batch.freed
                    self._give_up_issued(window, error)
                    raise
                if uses:
                    self._underway.append(Underway(sent, window.issued, first=window.first, operations=window))
                    self._first, self._templates, self._issued = window.end, [], []
                else:
                    self._underway.append(Underway(sent, ()))

    def _as_window(self) -> tuple[list[tuple[Any, ...]], Window]:
        """Return the issued operations with numbers: the uses for the ranks, and a window to keep until they answer."""
        uses, issued = [use for use, _ in self._issued], [each for _, each in self._issued]
        return uses, Window(self._first, issued, [tensors for _, tensors, _, _ in uses])

    def _give_up_issued(self, window: Window, error: MeshError | None) -> None:
        """Note that no rank does the issued operations. error: one that is told elsewhere; else each has its own."""
        self._told.difference_update([template.number for template in self._templates])
        self._first, self._templates, self._issued = window.end, [], []
        refused = {number: error or each.failed(NOT_SENT) for number, each, _ in window.each()}
        families = Families((), self.roots)
        window.note(self._failures, refused, families, math.inf if error is not None else window.first)

    def begin_repair(self) -> None:
        """Wait for all that is under way. From now on nothing is sent: new ranks do not know the tensors yet."""
        self._are_ranks_new = True
        self.settle_all()
        with self._lock, held_back():
            known = (*self._failures.lost.values(), *self._failures.unsure.values())
            why = next((error for error in known if not isinstance(error, TensorError)), None)
            self._give_up_issued(self._as_window()[1], why)

    def end_repair(self) -> None:
        """Send operations again: all ranks know the tensors."""
        self._are_ranks_new = False

    def check_step(self, step: RepeatedStep, inputs: Sequence[TensorId]) -> None:
        """Check that a recorded step can be done again; where the ranks are far behind, wait for them.

        It is asked before the step counts: to learn of a failure sets counters back.
        Raises: the error of a tensor that it needs, or of an earlier step if it was not told yet.
        """
        if self._issued:
            self.flush()
        if len(self._underway) > BATCHES_AHEAD:
            self._let_catch_up()
        if self._was_interrupted or self._failures.exist:
            self.check([*inputs, *step.captured])
        if (untold := self._replays.untold) is not None:
            self._replays.untold = None
            raise untold

    def replay(
        self,
        step: RepeatedStep,
        inputs: Sequence[TensorId],
        numbers: dict[int, Sequence[float]],
        undo: Callable[[], None],
    ) -> Sequence[TensorId]:
        """Have the ranks do a recorded step again, for which `check_step` has found nothing; return its results.

        It waits for nothing: ``numbers`` are right as long as no failure becomes known. undo: as in `Turn`.
        """
        number, *results = self.new_numbers(1 + len(step.recording.results))
        turn = Turn(step, number, inputs, results, undo)
        with self._lock:
            freed = self._take_freed()
            try:
                sent = self._send_step(turn, numbers, freed)
            except MeshError:
                self._unfreed = freed
                raise
            self._underway.append(Underway(sent, step.issued, turn, first=self._first))
            self._first += 1
        return results

    def _send_step(
        self, turn: Turn, numbers: dict[int, Sequence[float]], freed: Sequence[TensorId]
    ) -> Future[ValueMesh[Any]]:
        """Send a step: to ranks that know it, only the parts that differ each time."""
        step = turn.step
        number, calls = step.recording.number, self._replays.calls
        call = calls.get(number)
        unknown = step.recording if call is None else None
        fields = self._first, number, turn.turn, unknown, turn.inputs, numbers, turn.results, freed, anomalies.hunt.kind
        if call is None:
            sent = self.send("replay", fields, asked_by=step.asked_by)
            line, place = step.asked_by
            same = known_meshes.ask_at, place, self.name
            calls[number] = RepeatedCall(self.procs, _name_call(line), *same, caller=self)
            return sent
        self._sending = True
        try:
            return call.start((self.decided, "replay", (fields,)))
        finally:
            self._sending = False

    def put(self, method: str, number: TensorId, *args: Any) -> None:
        """Have the ranks make a tensor, by a method of `RankTensors` that takes its number first."""
        self.flush()
        if self.recorder is not None:
            self.recorder.note_put(method, number, args)
        with held_back():
            self.follow(method, (number,), self.send(method, number, *args))

    def give(self, made: Sequence[TensorId], sent: Sequence[tuple[ProcMesh, Any]], line: CodeLine) -> list[Future[Any]]:
        """Have ranks take tensors of this process; any thread may, it does not wait for ranks.

        sent: the message for each group of ranks, as for `RankTensors.take`. Returns: futures, done when it was read.
        """
        with self._lock:
            self._sending = True
            try:
                given = [procs.execute(known_meshes.ask, self.name, 0, "take", parts) for procs, parts in sent]
            finally:
                self._sending = False
            self._failures.forget(made)
            self._underway += [Underway(future, [Issued("distribute", line, made)]) for future in given]
        return given

    def follow(
        self, operation: str, made: Sequence[TensorId], future: Future[ValueMesh[Any]], origin: Handle | None = None
    ) -> None:
        """Count a call that makes tensors among the operations under way. origin: the tensor that they are made of."""
        cause = None if origin is None else functools.partial(_why_not_made, origin)
        self._underway.append(Underway(future, [Issued(operation, line_of_caller(), made)], cause=cause))

    def fetch(self, method: str, number: TensorId) -> Any:
        """Call a method of `RankTensors` on a tensor; return the first rank's answer. Raises: the tensor's error."""
        return next(iter(self.ask_with(self.ask, [number], method, number).values()))

    def ask_with(
        self, ask: Callable[..., Future[ValueMesh[Any]]], needed: Sequence[TensorId], method: str, *args: Any
    ) -> ValueMesh[Any]:
        """Call a method of `RankTensors` when tensors are there. Raises: the error of one that it needs.

        ask: `ask` or `send`. It is called at once, so again where ranks had halted before they had the tensors.
        """
        self.check(needed)
        while True:
            self.flush()
            with self._lock, held_back():
                asked = Underway(ask(method, *args), ())
                self._underway.append(asked)  # who has halted goes on when nobody waits in this any more
            self.settle_through(asked)
            self._tell_anomaly()
            self.check(needed)
            if not asked.is_behind_failure:
                return asked.future.get()

    def settle(self) -> None:
        """Wait until all that was issued has been done, or has failed. Raises: TensorError of a hunt's find."""
        self.flush()
        self.settle_all()
        self._tell_anomaly()

    def forget_find(self) -> None:
        self.anomaly, self.is_cut_off = None, False

    def _tell_anomaly(self) -> None:
        if self.anomaly is not None:
            found, self.anomaly = self.anomaly, None
            raise found

    def why_not(self, number: TensorId) -> MeshError | None:
        """Return why a tensor could not be made, if it could not; wait until that is known."""
        self.settle()
        return self._failures.lost.get(number)

    def ask(self, method: str, *args: Any, asked_by: NamedLine | None = None) -> Future[ValueMesh[Any]]:
        """Call a method of `RankTensors` on all ranks. asked_by: the line, for a call without one on ranks."""
        line, place = asked_by or as_named_line(line_of_caller())
        asked = self.decided, method, args
        return execute_as(self.procs, _name_call(line), known_meshes.ask_at, place, self.name, asked)

    def send(self, method: str, *args: Any, asked_by: NamedLine | None = None) -> Future[ValueMesh[Any]]:
        """Do `ask` without sending the issued operations first, as another call would."""
        if peeking:
            refuse_in_peek("an operation on mesh tensors")
        with self._lock:
            self._sending = True
            try:
                return self.ask(method, *args, asked_by=asked_by)
            finally:
                self._sending = False

    def _before_call(self) -> None:
        if self.recorder is not None and not any(
            isinstance(each, OpStream) and each._sending for each in anomalies.hunt.streams
        ):
            self.recorder.refuse("it asks the ranks for a value, or calls them")
        try:
            self.send_issued()  # calls of other threads come here as well: one thread alone settles
        except LayoutError:  # who needs these tensors is told; this call may be of the mesh as it is now
            self._free_by_base()

    def _free_by_base(self) -> None:
        """Tell the ranks that stayed which tensors are free, in a mesh that has grown or shrunk."""
        with self._lock:
            freed, self._unfreed, self._sending = self._unfreed, (), True
            try:
                self.procs.base().execute(known_meshes.free, self.name, freed)
            finally:
                self._sending = False

    def _take_freed(self) -> list[TensorId]:
        freed = self.forget_freed()
        for number in freed:
            self._replays.calls.pop(number, None)
        if self._failures.exist:
            self._failures.forget(freed)
        unfreed, self._unfreed = self._unfreed, ()
        return [*unfreed, *freed]


def _name_call(line: str) -> str:
    return f"mesh tensors ({line})" if line else "mesh tensors"
