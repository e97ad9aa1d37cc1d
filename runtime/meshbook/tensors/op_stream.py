"""The operations of one mesh on their way to its ranks: numbered, in batches, a bounded number of batches ahead.

    operation ──> batch ──256 of them, or somebody asks for a value──> one call of all ranks ──> RankTensors.run

Nothing is waited for until a value is needed, so failures come late: each result that could not be made remembers why,
and the line of the notebook that asked for it; who needs it is told then. Tensors that nobody refers to any more are
freed by number, with the next batch.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import math
import sys
import threading
import weakref
from collections import deque
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import Any, ClassVar, NamedTuple, Protocol

import torch

from meshbook.concurrency.future import Future
from meshbook.concurrency.sigint import held_back
from meshbook.errors import CallFailed, CallTimeout, LeftStopped, MeshError
from meshbook.mesh.proc_mesh import ProcMesh
from meshbook.shape.value_mesh import ValueMesh
from meshbook.tensors import anomalies, rank_tensors
from meshbook.tensors.failed_windows import Window
from meshbook.tensors.issued_lines import CodeLine, for_ranks, line_of_caller, name_code_line
from meshbook.tensors.op_failures import OVERWRITING, FailedOperations, Families, Issued, TensorError
from meshbook.tensors.operations import (
    HaltedAt,
    NewOutput,
    OperationBatch,
    Template,
    TensorId,
    Write,
)
from meshbook.tensors.replays import RepeatedStep, Replays, Turn, as_named

BATCH_USES = 256
BATCHES_AHEAD = 16
"""The controller is at most so far ahead of the ranks."""
NOT_SENT = "ranks were started again before it was sent, so nobody has done it: do it again"
HANG_NOTE_S = 10.0
"""A wait that takes longer says who holds the ranks up."""


class Handle:
    """What keeps a tensor on the ranks."""

    __slots__ = ("__weakref__", "number", "output", "stream")

    def __init__(self, number: TensorId, stream: OpStream, output: NewOutput) -> None:
        """output: what it is, which is a part of the signature of operations that read it."""
        self.number, self.stream, self.output = number, stream, output
        # not by __del__: an interrupt that comes within Python's code there is lost
        stream.held[number] = held = _HandleRef(self, stream.note_freed)
        held.number = number


class _HandleRef(weakref.ref[Handle]):
    __slots__ = ("number",)

    number: TensorId


class _Underway(NamedTuple):
    """A batch, or a recorded step, that the ranks have been sent."""

    future: Future[ValueMesh[Any]]
    issued: Sequence[tuple[Any, ...]]
    turn: Turn | None = None
    origin: Handle | None = None
    """A tensor of another mesh that its result is made of."""
    first: int | None = None
    """The number of the first operation; None for a call that is none."""
    operations: Window | None = None
    """Those of a batch."""

    @property
    def turns(self) -> list[Turn]:
        """Recorded steps that were done if it has succeeded."""
        if self.turn is not None or self.operations is None:
            return [self.turn] if self.turn is not None else []
        return [turn for number, turn in self.operations.turns.items() if number not in self.operations.refused]

    @property
    def window(self) -> Window | None:
        """What is to be known of its operations should one fail."""
        if self.turn is not None and self.first is not None:
            return Window.of_step(self.first, self.turn)
        return self.operations


class Recorder(Protocol):
    """Is told what happens while a step is recorded."""

    def note(self, stream: OpStream, template: Template, use: tuple[Any, ...], issued: tuple[Any, ...]) -> None:
        """An operation."""

    def note_tensors(self, tensors: Iterable[object]) -> None:
        """What an operation reads and makes."""

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
        self._freed: list[_HandleRef] = []
        self._unfreed: Sequence[TensorId] = ()
        """What ranks could not be told of that is freed."""
        self.note_freed = self._freed.append
        self.held: dict[TensorId, _HandleRef] = {}
        """What notes that a handle is gone; by its number."""
        self.roots: dict[TensorId, TensorId] = {}
        """Of views the tensor that they are, or were, a view of, and that is none itself."""
        self._numbers = itertools.count(1)
        self._told: set[int] = set()
        """Templates that the ranks know."""
        self._templates: list[Template] = []
        self._issued: list[tuple[tuple[Any, ...], tuple[Any, ...]]] = []
        """What is not sent yet: the fields of a `Use` and of an `Issued` each, in one list, which nothing can tear."""
        self._first = 0
        """The number of the first operation of the next batch."""
        self._underway: deque[_Underway] = deque()
        self._halted: list[tuple[Window, MeshError | None]] = []
        """Batches from the first on that failed, until all that is under way has come back."""
        self._are_ranks_new = False
        """Whether some were started again, and have not been told of the tensors."""
        self._resumed = 0
        """How often the ranks were told to go on behind what failed."""
        self._failures = FailedOperations(self.roots)
        self._replays = Replays(self._failures)
        self._was_interrupted = False
        """Whether it is not known yet what an interrupt has left undone."""
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

    def note_views(self, views: Sequence[TensorId], base: TensorId) -> None:
        """What is in the memory of another tensor."""
        root = self.roots.get(base, base)
        for number in views:
            self.roots[number] = root

    def find_views(self, numbers: Sequence[TensorId], others: Sequence[TensorId]) -> list[tuple[int, TensorId]]:
        """Which of these, by their places, are views of a tensor that is still there, of ``others``, or of one."""
        roots = [self.roots.get(number, 0) for number in numbers]
        there = {root for root in roots if (held := self.held.get(root)) is not None and held() is not None}
        return [
            (at, root)
            for at, root in enumerate(roots)
            if root and (root in there or root in others or roots.count(root) > 1)
        ]

    def issue(
        self,
        template: Template,
        tensors: Sequence[TensorId],
        numbers: Sequence[float],
        results: Sequence[TensorId],
        written: Sequence[TensorId] = (),
    ) -> None:
        """Have the ranks do an operation. Raises: the error of a tensor that it needs and that could not be made."""
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

    def check(self, tensors: Sequence[TensorId], overwritten: Sequence[TensorId] = ()) -> None:
        """Raises: the error of a tensor that could not be made. overwritten: of which no value is read."""
        if self._was_interrupted:
            self._was_interrupted = False
            self._settle_all()
        if (error := self._failures.find(tensors, overwritten)) is not None:
            if error is self._replays.untold:
                self._replays.untold = None
            raise error

    def why_not(self, number: TensorId) -> MeshError | None:
        """Why a tensor could not be made, if it could not; waits until that is known."""
        self.settle()
        return self._failures.lost.get(number)

    def flush(self) -> None:
        """Send what was issued so far; where the ranks are far behind, wait for them."""
        self._send_issued()
        while not self._sending and len(self._underway) > BATCHES_AHEAD:
            self._settle()

    def _send_issued(self) -> None:
        with self._lock:
            if self._sending or self._are_ranks_new or not (self._issued or self._freed):
                return  # the first where sending a batch is a call that would send what was issued before it
            with held_back():  # what was sent is known to be under way
                uses, issued = [use for use, _ in self._issued], [each for _, each in self._issued]
                lines = for_ranks(each[1] for each in issued)
                batch = OperationBatch(self._first, self._templates, uses, lines, self._take_freed(), anomalies.hunted)
                try:
                    sent = self.send("run", batch, asked_by=issued[0][1] if issued else None)
                except MeshError as error:
                    self._unfreed = batch.freed
                    self._give_up_issued(error)
                    raise
                if issued:
                    window = self._take_issued()
                    self._underway.append(_Underway(sent, issued, first=window.first, operations=window))
                else:
                    self._underway.append(_Underway(sent, ()))

    def _take_issued(self) -> Window:
        """Number what was issued; it has been sent, or is given up."""
        uses, issued = [use for use, _ in self._issued], [each for _, each in self._issued]
        window = Window(self._first, issued, [tensors for _, tensors, _, _ in uses])
        self._first, self._templates, self._issued = window.end, [], []
        return window

    def _give_up_issued(self, error: MeshError | None) -> None:
        """What was issued is not done by any rank. error: that was told, or will be; else each tells its own."""
        told = {template.number for template in self._templates}
        window = self._take_issued()
        self._told -= told
        refused = {number: error or each.failed(NOT_SENT) for number, each, _ in window.each()}
        window.note(self._failures, refused, Families((), self.roots), math.inf if error is not None else window.first)

    def begin_repair(self) -> None:
        """Come to the end of what is under way. From now on nothing is sent: new ranks do not know the tensors yet."""
        self._are_ranks_new = True
        self._settle_all()
        with self._lock, held_back():
            known = (*self._failures.lost.values(), *self._failures.unsure.values())
            self._give_up_issued(next((error for error in known if not isinstance(error, TensorError)), None))

    def end_repair(self) -> None:
        """All ranks know the tensors again."""
        self._are_ranks_new = False

    def replay(
        self,
        step: RepeatedStep,
        inputs: Sequence[TensorId],
        numbers: dict[int, Sequence[float]],
        results: Sequence[TensorId],
    ) -> None:
        """Have the ranks do a recorded step again, for which `check_step` has found nothing."""
        names = dict(zip((*step.recording.inputs, *step.recording.results), (*inputs, *results), strict=True))
        turn = Turn(step, self.new_number(), names)
        if self._issued:
            self.flush()
        with self._lock, held_back():
            replay = self._replays.message(self._first, turn, inputs, numbers, results, self._take_freed())
            sent = self.send("replay", replay, asked_by=step.issued[0][1])
            self._underway.append(_Underway(sent, step.issued, turn, first=self._first))
            self._first += 1
        while len(self._underway) > BATCHES_AHEAD:
            self._settle()

    def check_step(self, step: RepeatedStep, inputs: Sequence[TensorId], *, in_turn: bool) -> None:
        """Whether a recorded step can be done again; in_turn: when the last one is done, so that it can be undone.

        Raises: the error of a tensor that it needs, or of the last step if nobody was told.
        """
        if in_turn:
            self._settle_all()
        if self._failures.exist:
            self.check([*inputs, *step.captured])
        if (error := self._replays.take_untold()) is not None:
            raise error

    def put(self, method: str, number: TensorId, *args: Any) -> None:
        """Have the ranks make a tensor, by a method of `RankTensors` that takes its number first."""
        self.flush()
        if self.recorder is not None:
            self.recorder.note_put(method, number, args)
        with held_back():
            self.follow(method, (number,), self.send(method, number, *args))

    def give(self, made: Sequence[TensorId], sent: Sequence[tuple[ProcMesh, Any]], line: CodeLine) -> list[Future[Any]]:
        """Have ranks take tensors of this process; any thread may, it does not wait for ranks.

        sent: which ranks are given what, as `RankTensors.take` says. Returns: done when they have come as far.
        """
        with self._lock:
            self._sending = True
            try:
                given = [procs.execute(rank_tensors.ask, self.name, 0, "take", parts) for procs, parts in sent]
            finally:
                self._sending = False
            self._failures.forget(made)
            self._underway += [_Underway(future, [Issued("distribute", line, made)]) for future in given]
        return given

    def give_up(self, made: Sequence[TensorId], error: MeshError) -> None:
        """Tensors could not be made."""
        self._failures.lost.update(dict.fromkeys(made, error))

    def follow(
        self, operation: str, made: Sequence[TensorId], future: Future[ValueMesh[Any]], origin: Handle | None = None
    ) -> None:
        """Count a call that makes tensors, and tells if it could not, to what is under way. origin: made of which."""
        self._underway.append(_Underway(future, [Issued(operation, line_of_caller(), made)], origin=origin))

    def fetch(self, method: str, number: TensorId) -> Any:
        """What a method of `RankTensors` says of a tensor, on the first rank. Raises: the error of what it needs."""
        return next(iter(self.ask_with(self.ask, [number], method, number).values()))

    def ask_with(
        self, ask: Callable[..., Future[ValueMesh[Any]]], needed: Sequence[TensorId], method: str, *args: Any
    ) -> ValueMesh[Any]:
        """What a method of `RankTensors` answers when tensors are there. Raises: the error of one that it needs.

        ask: `ask` or `send`. It is asked at once, so again where ranks had halted before they had the tensors.
        """
        self.check(needed)
        while True:
            self.flush()
            with held_back():
                resumed, asked = self._resumed, ask(method, *args)
                self._underway.append(_Underway(asked, ()))  # who has halted goes on when nobody waits in this any more
            self.settle()
            self.check(needed)
            if resumed == self._resumed:
                return asked.get()

    def settle(self) -> None:
        """Wait until all that was issued has been done, or has failed. Raises: TensorError of a hunt's find."""
        self.flush()
        self._settle_all()
        if self.anomaly is not None:
            found, self.anomaly = self.anomaly, None
            raise found

    def _settle_all(self) -> None:
        while self._underway or self._halted:
            self._settle()

    @property
    def doubtful(self) -> Mapping[TensorId, Sequence[Write]]:
        """Tensors that some ranks may have written to where others have not, and by which operations."""
        return self._failures.writes

    def renew(
        self, whole: Collection[TensorId], lost: Mapping[TensorId, MeshError], torn: Mapping[TensorId, MeshError]
    ) -> None:
        """After a repair: what is ``whole`` again, equal on the ranks that hold the same part, and what is gone.

        torn: of which some parts were written, and others not.

        What was made while a rank died is whole where nothing else has failed: the others went on as far as they could.
        """
        lost_ones = self._failures.lost
        for number in whole:
            if not isinstance(lost_ones.get(number), TensorError):
                lost_ones.pop(number, None)
        lost_ones.update(lost)
        self._failures.unsure = dict(torn)
        self._failures.writes = {number: [] for number in torn}
        self._forget_told()
        self._replays.decide(self.ask("stepped").get().values() if self._replays.are_undecided else ())

    def ask(self, method: str, *args: Any, asked_by: CodeLine = None) -> Future[ValueMesh[Any]]:
        """Call a method of `RankTensors` on all ranks. asked_by: the line of what has none of its own on ranks."""
        place = line_of_caller() if asked_by is None else None
        line = name_code_line(asked_by or place)
        ((_, place),) = for_ranks([place])
        what = f"mesh tensors ({line})" if line else "mesh tensors"
        return self.procs.execute_as(what, rank_tensors.ask_at, place, self.name, self.decided, method, *args)

    @property
    def decided(self) -> int:
        """The number below which it is known of all operations what became of them."""
        with self._lock:
            if self._halted:
                return self._halted[0][0].first
            return next((each.first for each in self._underway if each.first is not None), self._first)

    def send(self, method: str, *args: Any, asked_by: CodeLine = None) -> Future[ValueMesh[Any]]:
        """As `ask`, which is a call that would send what was issued before it."""
        with self._lock:
            self._sending = True
            try:
                return self.ask(method, *args, asked_by=asked_by)
            finally:
                self._sending = False

    def _before_call(self) -> None:
        sends = any(isinstance(stream, OpStream) and stream._sending for stream in anomalies.streams)
        if self.recorder is not None and not sends:
            self.recorder.refuse("it asks the ranks for a value, or calls them")
        self._send_issued()  # calls of other threads come here as well: one thread alone settles

    def _take_freed(self) -> list[TensorId]:
        count = len(self._freed)
        freed = [each.number for each in self._freed[:count]]
        del self._freed[:count]
        for number in freed:
            self.held.pop(number, None)
            self.roots.pop(number, None)
        self._failures.forget(freed)
        unfreed, self._unfreed = self._unfreed, ()
        return [*unfreed, *freed]

    def _settle(self) -> None:
        """Wait for the oldest batch, and note what failed in it."""
        try:
            if self._underway:
                self._settle_oldest()
            if self._halted:
                with self._lock:  # nobody sends a batch that it does not know of
                    self._send_issued()  # nor is there one that was issued without knowing
                    if not self._underway:
                        self._go_on()
        except KeyboardInterrupt:
            self._was_interrupted = True
            raise

    def _settle_oldest(self) -> None:
        oldest, error = self._underway[0], None
        try:
            self._note_answers(oldest, self._await(oldest.future))
        except (KeyboardInterrupt, LeftStopped):  # it goes on, and is waited for again
            raise
        except MeshError as raised:
            error = raised
        if error is None and not self._halted:
            with self._lock:
                self._underway.popleft()
        else:
            self._note_failed(oldest, error)

    def _note_failed(self, oldest: _Underway, error: MeshError | None) -> None:
        """error: None for what came back well behind what failed."""
        with held_back(), self._lock:
            self._underway.popleft()
            if (window := oldest.window) is not None:
                self._halted.append((window, error))
            elif error is not None:
                self._forget_told()
                if oldest.issued:
                    _, cause, is_said = Window(0, oldest.issued, []).first_failed(error)
                    self._replays.note_lost(cause.error, oldest.issued, Families(()), is_said=is_said)

    def _forget_told(self) -> None:
        """A rank that is new, or was interrupted before it began, has not read what it was sent."""
        self._told.clear()
        self._replays.forget_told()

    def _note_answers(self, done: _Underway, answers: ValueMesh[Any]) -> None:
        if not done.issued:
            return  # a value was asked for
        failed = {number: why for each in answers.values() for number, why in (each or {}).items()}
        for turn in done.turns:
            self._failures.forget(turn.step.left)
        anomaly = failed.pop(anomalies.FOUND, "")
        if anomaly and self.anomaly is None and anomalies.hunted and (window := done.window) is not None:
            number, within, why = anomaly.split(" ", 2)
            self.anomaly = window.at(int(number), int(within)).failed(why)
        known = done.origin.stream.why_not(done.origin.number) if failed and done.origin is not None else None
        for each in map(Issued._make, done.issued if failed else ()):
            results = as_named(each.results, done.turn)
            if why := next((failed[number] for number in results if number in failed), ""):
                self._failures.lost.update(dict.fromkeys(results, known or each.failed(why)))

    def _go_on(self) -> None:
        """Have the ranks go on behind an operation that failed, or give up all that is left where they cannot.

        All have halted, or have nothing to do: what was issued has been sent, and has come back.
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
        with held_back():
            if causes and told:
                undone_from: float = max(each.number for each in told)
                refused = window.spread(causes, self._failures, families)
            else:
                self._forget_told()
                causes, undone_from = {begin: first}, math.inf
                refused = {**dict.fromkeys(range(begin, window.end), first.error), **window.refused}
            for number, turn in window.turns.items():
                if number in refused and number not in window.refused:
                    within = causes[number].within if number in causes else 0
                    # a rank that lives, and did not do what is before a step, has not begun with the step
                    said = bool(told) or (is_said if number == begin else isinstance(errors[0], CallFailed))
                    self._replays.note_lost(
                        refused[number], turn.step.issued, families, turn, number, within, is_said=said
                    )
            window.note(self._failures, refused, families, undone_from)
            self._failures.keep_written(self.held)
            self._resumed += 1
            if told:
                self._resume(window._replace(refused=refused))
            self._halted.clear()  # not before: till then nothing of it counts as decided

    def _resume(self, window: Window) -> None:
        """Have the ranks go on from where they have halted, without what is refused."""
        why = {number: str(error) for number, error in window.refused.items()}
        known = self._failures.lost
        lost = {
            number: why[at] for at, each, _ in window.each() if at in why for number in each.results if number in known
        }
        with contextlib.suppress(MeshError):  # of a mesh that cannot be called they are gone
            resumed = self.send("resume", why, lost, self._failures.doubted())
            self._underway.append(_Underway(resumed, window.issued, first=window.first, operations=window))

    def _await(self, future: Future[ValueMesh[Any]]) -> ValueMesh[Any]:
        """What the ranks answer; where some hold others up meanwhile, who does is said once."""
        with contextlib.suppress(CallTimeout):
            return future.get(HANG_NOTE_S)
        with contextlib.suppress(MeshError):
            if (verdict := self.procs.stacks().verdict) is not None:
                print(f"mesh tensors wait for this: {verdict.text}", file=sys.stderr)
        return future.get()
