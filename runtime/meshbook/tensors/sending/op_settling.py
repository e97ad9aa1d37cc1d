"""The operations of one mesh that its ranks have been sent, until it is known whether they were done.

    OpStream ──sent──> under way ──the oldest comes back──> done
                                 └─ it failed ─> halted, till all are back ─> told which fail with it ─> under way again

Nothing is waited for until a value is needed, so failures come late: each result that could not be made remembers why,
and the line of the notebook that asked for it; who needs it is told then. A tensor's number is given out here, and
lives as long as its `Handle`.
"""

from __future__ import annotations

import abc
import contextlib
import functools
import itertools
import math
import sys
import threading
import weakref
from collections import deque
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

import msgspec

from meshbook.concurrency.future import Future
from meshbook.concurrency.interrupts import held_back
from meshbook.errors import CallFailed, CallTimeout, LeftStopped, MeshError
from meshbook.mesh.proc_mesh import ProcMesh
from meshbook.shape.value_mesh import ValueMesh
from meshbook.tensors.messages import anomalies
from meshbook.tensors.messages.issued_lines import NamedLine
from meshbook.tensors.messages.operations import HaltedAt, NewOutput, TensorId, Write
from meshbook.tensors.sending.op_failures import (
    FailedOperations,
    Families,
    Issued,
    Replays,
    TensorError,
    Turn,
    Window,
    as_named,
)


class Handle:
    """An object that keeps a tensor on the ranks as long as it lives."""

    __slots__ = ("__weakref__", "number", "output", "stream")

    def __init__(self, number: TensorId, stream: SentOperations, output: NewOutput) -> None:
        """output: shape, strides and dtype, which are part of the signature of operations that read the tensor."""
        self.number, self.stream, self.output = number, stream, output
        # not by __del__: an interrupt that comes within Python's code there is lost
        stream.held[number] = held = _HandleRef(self, stream.note_freed)
        held.number = number


class _HandleRef(weakref.ref[Handle]):
    __slots__ = ("number",)

    number: TensorId


HANG_NOTE_S = 10.0
"""The time after which a wait says which ranks hold the others up."""


class Underway(msgspec.Struct, eq=False):
    """A batch, or a recorded step, that the ranks have been sent."""

    future: Future[ValueMesh[Any]]
    issued: Sequence[tuple[Any, ...]]
    turn: Turn | None = None
    cause: Callable[[], MeshError | None] | None = None
    """A function for the error of the tensor of another mesh that the result is made of."""
    first: int | None = None
    """The number of the first operation; None for a call that is none."""
    operations: Window | None = None
    """The operations of a batch."""
    is_behind_failure: bool = False
    """Whether it came back from ranks that had halted before they had it."""

    @property
    def turns(self) -> list[Turn]:
        """Return the recorded steps that were done if it has succeeded."""
        if self.turn is not None or self.operations is None:
            return [self.turn] if self.turn is not None else []
        return [turn for number, turn in self.operations.turns.items() if number not in self.operations.refused]

    @property
    def window(self) -> Window | None:
        """Return the window of its operations, for the case that one fails."""
        if self.turn is not None and self.first is not None:
            return Window.of_step(self.first, self.turn)
        return self.operations


class SentOperations(abc.ABC):
    """The operations of one mesh. Any thread may wait for them; each answer is noted once."""

    def __init__(self, procs: ProcMesh, name: str) -> None:
        self.procs = procs
        self.name = name
        self._lock = threading.RLock()
        """A lock to note or send an operation, since calls of other threads send issued operations, too."""
        self.held: dict[TensorId, weakref.ref[Handle]] = {}
        """The references that note that a handle is gone, by its number."""
        self.roots: dict[TensorId, TensorId] = {}
        """The tensor, no view itself, that each view is or was a view of."""
        self._freed: list[_HandleRef] = []
        """The references of handles that are gone, of which ranks were not told yet."""
        self.note_freed = self._freed.append
        self._numbers = itertools.count(1)
        self._told: set[int] = set()
        """Templates that the ranks know."""
        self._first = 0
        """The number of the first operation that is not sent yet."""
        self._underway: deque[Underway] = deque()
        self._halted: list[tuple[Window, MeshError | None]] = []
        """Batches from the first on that failed, until all that is under way has come back."""
        self._failures = FailedOperations(self.roots)
        self._replays = Replays(self._failures)
        self._was_interrupted = False
        """Whether it is not known yet which operations an interrupt has cut off."""
        self.anomaly: MeshError | None = None
        self.is_cut_off = False
        """Whether a hunt was cut off."""

    @abc.abstractmethod
    def send(self, method: str, *args: Any, asked_by: NamedLine | None = None) -> Future[ValueMesh[Any]]:
        """Call a method of `RankTensors` on all ranks."""

    @abc.abstractmethod
    def send_issued(self) -> None:
        """Send operations that were issued before the failures were known here."""

    @abc.abstractmethod
    def why_not(self, number: TensorId) -> MeshError | None:
        """Return why a tensor could not be made, if it could not; wait until that is known."""

    # ---- numbers of tensors ------------------------------------------------------------------------------------------

    def new_number(self) -> TensorId:
        return next(self._numbers)

    def new_numbers(self, count: int) -> range:
        """Return as many new numbers, in a row; a thread that issues no operations may ask for them."""
        with self._lock:
            first = next(self._numbers)
            self._numbers = itertools.count(first + count)
            return range(first, first + count)

    def note_views(self, views: Sequence[TensorId], base: TensorId) -> None:
        """Note that tensors are in the memory of another one."""
        root = self.roots.get(base, base)
        for number in views:
            self.roots[number] = root

    def find_views(self, numbers: Sequence[TensorId], others: Sequence[TensorId]) -> list[tuple[int, TensorId]]:
        """Return the places of views of a tensor that is still there, of one of ``others``, or of one root."""
        roots = [self.roots.get(number, 0) for number in numbers]
        there = {root for root in roots if (held := self.held.get(root)) is not None and held() is not None}
        return [
            (at, root)
            for at, root in enumerate(roots)
            if root and (root in there or root in others or roots.count(root) > 1)
        ]

    def forget_freed(self) -> list[TensorId]:
        """Return the tensors whose handles are gone since the last call, and forget them."""
        count = len(self._freed)
        freed: list[TensorId] = []
        for each in self._freed[:count]:
            freed.append(number := each.number)
            self.held.pop(number, None)
            self.roots.pop(number, None)
        del self._freed[:count]
        return freed

    # ---- operations under way ----------------------------------------------------------------------------------------

    def check(self, tensors: Sequence[TensorId], overwritten: Sequence[TensorId] = ()) -> None:
        """Raise the error of a tensor that could not be made. overwritten: tensors of which no value is read."""
        if self._was_interrupted:
            self._was_interrupted = False
            self.settle_all()
        if (error := self._failures.find(tensors, overwritten)) is not None:
            if error is self._replays.untold:
                self._replays.untold = None
            raise error

    def give_up(self, made: Sequence[TensorId], error: MeshError) -> None:
        """Note that tensors could not be made."""
        self._failures.lost.update(dict.fromkeys(made, error))

    def is_sound(self, number: TensorId) -> bool:
        """Whether no failure of a tensor is known."""
        return number not in self._failures.lost and number not in self._failures.unsure

    def sound_tensors(self) -> set[TensorId]:
        """Return the tensors that the program holds, and of which no failure is known."""
        return {number for number, held in list(self.held.items()) if held() is not None} - self._failures.lost.keys()

    @property
    def doubtful(self) -> Mapping[TensorId, Sequence[Write]]:
        """The tensors that some ranks may have written to where others have not, and the operations."""
        return self._failures.writes

    def renew(
        self,
        whole: Collection[TensorId],
        lost: Mapping[TensorId, MeshError],
        torn: Mapping[TensorId, MeshError],
        undone: Collection[Write],
    ) -> None:
        """Note the tensors that are ``whole`` after a repair, equal on ranks that hold the same part, and lost ones.

        torn: tensors of which some parts were written, and others not. undone: writes that whole tensors have not seen.
        A tensor made while a rank died is whole where nothing else failed: the others went on as far as they could.
        """
        lost_ones = self._failures.lost
        for number in whole:
            if not isinstance(lost_ones.get(number), TensorError):
                lost_ones.pop(number, None)
        lost_ones.update(lost)
        self._failures.renew(torn)
        self._forget_told()
        self._replays.decide(undone)

    @property
    def decided(self) -> int:
        """The number below which it is known of all operations whether they were done."""
        with self._lock:
            if self._halted:
                return self._halted[0][0].first
            for each in self._underway:
                if each.first is not None:
                    return each.first
            return self._first

    def settle_all(self) -> None:
        while self._underway or self._halted:
            self._settle()

    def settle_through(self, asked: Underway) -> None:
        """Wait until the ranks have answered, and go on if they had halted; other threads may send meanwhile."""
        while asked in self._underway or (asked.is_behind_failure and self._halted):
            self._settle()

    def _settle(self) -> None:
        """Wait for the oldest batch, and note its failures."""
        try:
            with self._lock:
                oldest = self._underway[0] if self._underway else None
            if oldest is not None:
                self._settle_oldest(oldest)
            if self._halted:
                with self._lock:  # nobody sends a batch that it does not know of
                    self.send_issued()  # nor is there one that was issued without knowing
                    if self._halted and not self._underway:
                        self._go_on()
        except KeyboardInterrupt:
            self._was_interrupted = True
            raise

    def _settle_oldest(self, oldest: Underway) -> None:
        """Wait for a batch; of several threads that wait for the same, the first to come back notes it."""
        answers: ValueMesh[Any] | None = None
        error: MeshError | None = None
        try:
            answers = self._await(oldest.future)
        except (KeyboardInterrupt, LeftStopped):  # it goes on, and is waited for again
            raise
        except MeshError as raised:
            error = raised
        with self._lock, held_back():
            if not self._underway or self._underway[0] is not oldest:
                return
            if answers is not None:
                try:
                    self._note_answers(oldest, answers)
                except MeshError as raised:
                    error = raised
            oldest.is_behind_failure = bool(self._halted)
            self._underway.popleft()
            if error is not None or self._halted:
                self._note_failed(oldest, error)

    def _note_failed(self, oldest: Underway, error: MeshError | None) -> None:
        """Note a batch that failed, or came back behind one. error: None for one that came back well."""
        if (window := oldest.window) is not None:
            self._halted.append((window, error))
        elif error is not None:
            self._forget_told()
            if oldest.issued:
                _, cause, is_said = Window(0, oldest.issued, []).first_failed(error)
                self._replays.note_lost(cause.error, oldest.issued, Families(()), is_said=is_said)

    def _forget_told(self) -> None:
        """Forget which messages ranks have read: one that is new, or was interrupted before it began, has read none."""
        self._told.clear()
        self._replays.calls.clear()

    def _note_answers(self, done: Underway, answers: ValueMesh[Any]) -> None:
        if not done.issued:
            return  # a value was asked for
        failed: dict[TensorId, str] = {}
        for each in answers.values():
            if each:
                failed.update(each)
        if self._failures.exist:
            for turn in done.turns:
                self._failures.forget(turn.step.left)
        if not failed:
            return
        anomaly = failed.pop(anomalies.FOUND, "")
        if anomaly and self.anomaly is None and anomalies.hunt.kind and (window := done.window) is not None:
            number, within, why = anomaly.split(" ", 2)
            self.anomaly = window.at(int(number), int(within)).failed(why)
        known = done.cause() if failed and done.cause is not None else None
        for operation in map(Issued._make, done.issued if failed else ()):
            results = as_named(operation.results, done.turn)
            if why := next((failed[number] for number in results if number in failed), ""):
                self._failures.lost.update(dict.fromkeys(results, known or operation.failed(why)))

    def _go_on(self) -> None:
        """Have the ranks go on behind an operation that failed, or give up all the rest where they cannot.

        All ranks have halted, or have nothing to do: all issued operations have been sent, and have come back.
        """
        window = functools.reduce(Window.joined, [each for each, _ in self._halted])
        errors = [error for _, error in self._halted if error is not None]
        told: list[HaltedAt] = []
        if causes := window.causes(errors):
            try:
                told = list(self.send("progress", window.written()).get().values())
            except (KeyboardInterrupt, LeftStopped):
                raise
            except MeshError as error:
                errors.insert(0, error)
        families = Families(told, self.roots)
        begin, first, is_said = window.first_failed(errors[0])
        stepped = self._ask_stepped() if window.turns and not told else None
        with held_back():
            if causes and told:
                undone_from: float = max(each.number for each in told)
                refused = window.spread(causes, self._failures, families)
            else:
                self._forget_told()
                self.is_cut_off = bool(anomalies.hunt.kind)
                causes, undone_from = {begin: first}, math.inf
                refused = {**dict.fromkeys(range(begin, window.end), first.error), **window.refused}
            for number, turn in reversed(list(window.turns.items())):
                if number in refused and number not in window.refused:
                    within = causes[number].within if number in causes else 0
                    # a rank that lives, and did not do what is before a step, has not begun with the step
                    said = bool(told) or (is_said if number == begin else isinstance(errors[0], CallFailed))
                    cut_off = turn.step.issued, families, turn, number, within
                    self._replays.note_lost(refused[number], *cut_off, is_said=said, stepped=stepped)
            window.note(self._failures, refused, families, undone_from)
            self._failures.keep_written(self.held)
            if told:
                self._resume(window._replace(refused=refused))
            self._halted.clear()  # not before: till then nothing of it counts as decided

    def _ask_stepped(self) -> TensorId | None:
        """Return the last turn in which a rank has begun to step with an optimizer, unless one cannot be asked."""
        try:
            return max(map(int, self.send("stepped").get().values()))
        except (KeyboardInterrupt, LeftStopped):
            raise
        except MeshError:
            return None

    def _resume(self, window: Window) -> None:
        """Have the ranks go on from where they have halted, without the refused operations."""
        why = {number: str(error) for number, error in window.refused.items()}
        known = self._failures.lost
        lost = {
            number: why[at] for at, each, _ in window.each() if at in why for number in each.results if number in known
        }
        with contextlib.suppress(MeshError):  # of a mesh that cannot be called they are gone
            resumed = self.send("resume", why, lost, self._failures.doubted())
            self._underway.append(Underway(resumed, window.issued, first=window.first, operations=window))

    def _await(self, future: Future[ValueMesh[Any]]) -> ValueMesh[Any]:
        """Return the answers of the ranks; where some hold others up meanwhile, say once which."""
        try:
            return future.get(HANG_NOTE_S)
        except CallTimeout:
            pass
        with contextlib.suppress(MeshError):
            if (verdict := self.procs.stacks().verdict) is not None:
                print(f"mesh tensors wait for this: {verdict.text}", file=sys.stderr)
        return future.get()
