"""The operations that a rank has yet to do, batches and recorded steps, and the tensors that they make.

Operations are done in order. At the first that fails a rank halts, keeps the rest, and goes on when the controller has
told it which operations fail for that reason.
"""

from __future__ import annotations

import itertools
import weakref
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from meshbook.errors import kind_of
from meshbook.tensors.messages.anomalies import Search
from meshbook.tensors.messages.issued_lines import CodeLine, each_line, frame_at, name_code_line
from meshbook.tensors.messages.operations import (
    WAIT,
    HaltedAt,
    OperationBatch,
    OperationFailed,
    Replay,
    Template,
    TensorId,
    Undone,
    Use,
    Write,
)
from meshbook.tensors.ranks.operator_rules import CompiledTemplate
from meshbook.tensors.ranks.partial_sums import lay_all_out
from meshbook.tensors.ranks.rank_operations import NotMade, Operations, RankTensor, end_shared_sums
from meshbook.tensors.ranks.step_plans import KnownStep, StepRun, StepTrace


class Left(NamedTuple):
    """Operations that are to be done, one behind the other, and the tensors that are free after them."""

    first: int
    """The number of the first operation; a recorded step has but one number."""
    uses: Sequence[Use]
    lines: Sequence[CodeLine]
    freed: Sequence[TensorId]
    search: Search | None = None
    replay: Replay | None = None
    done: int = 0
    """The number of uses that are done."""
    run: StepRun | None = None
    """The run of a step that was cut off while it was done as planned."""

    @property
    def number(self) -> int:
        """The number of the operation that is done next."""
        return self.first if self.replay is not None else self.first + self.done

    @property
    def end(self) -> int:
        """The number behind the last."""
        return self.first + (1 if self.replay is not None else len(self.uses))


class Missed(Exception):
    """Raised on a rank that an interrupt kept from operations before these."""


class Failed(NamedTuple):
    """The mark of a result whose operation failed."""

    why: str


GONE = "a tensor that it needs is not on this rank"


class RankBatches:
    """The mesh tensors of one process, and the operations of the controller on them."""

    def __init__(self, mesh: DeviceMesh) -> None:
        self.mesh = mesh
        self._operations = Operations(mesh)
        self._tensors: dict[TensorId, RankTensor | Failed] = {}
        self._templates: dict[int, Template] = {}
        self._compiled: dict[int, CompiledTemplate] = {}
        self._steps: dict[TensorId, KnownStep] = {}
        self._turn = self._waits = self._waited = 0
        self._waited_for: tuple[weakref.ref[torch.Tensor], int] | None = None
        """The first parameter that the optimizer is about to write, and its version until it does."""
        self._next = 0
        """The number of the first operation that this rank has not been sent."""
        self._left: list[Left] = []
        """The operations with which this rank goes on when it is told to, if it has halted."""
        self._halted_by = OperationFailed(0, "", "", "")
        self._undone: list[Undone] = []
        """The operations left out since the last repair, unless it was settled that they do not matter."""
        self._cut_off: StepRun | None = None
        """The step in which this rank has just halted, if it was done as planned."""

    def run(self, batch: OperationBatch) -> dict[TensorId, str]:
        """Do the operations of a batch; return which results failed, and why. Raises: OperationFailed, Missed."""
        self._templates.update((template.number, template) for template in batch.templates)
        uses = list(map(Use._make, batch.uses))
        search = Search(batch.hunted, self.mesh, len(uses)) if batch.hunted and uses else None
        return self._begin(Left(batch.first, uses, list(each_line(batch.lines, len(uses))), batch.freed, search))

    def replay(self, fields: tuple[Any, ...]) -> dict[TensorId, str]:
        """Do a recorded step once more; as `run`. fields: of a `Replay`."""
        replay = Replay._make(fields)
        if replay.recording is not None:
            self._steps[replay.number] = KnownStep(replay.recording)
            self._templates.update((template.number, template) for template in replay.recording.templates)
        known = self._steps[replay.number]
        uses = list(known.uses)
        for index, numbers in replay.numbers.items():
            uses[index] = uses[index]._replace(numbers=numbers)
        search = Search(replay.hunted, self.mesh, len(uses)) if replay.hunted else None
        return self._begin(Left(replay.first, uses, known.lines, replay.freed, search, replay))

    def _begin(self, left: Left) -> dict[TensorId, str]:
        if not left.uses or left.first != self._next:
            self._free(left.freed)
            if not left.uses:
                return {}
            raise Missed(f"operations {self._next} to {left.first - 1} did not reach this rank: it was interrupted")
        self._next = left.end
        if self._left:
            self._left.append(left)
            raise OperationFailed(*self._halted_by.args)  # else nobody frees the ranks that wait for this one
        return self._go_on([left], {})

    @property
    def why_halted(self) -> str:
        """Empty while this rank goes on."""
        return str(self._halted_by) if self._left else ""

    def progress(self, written: Collection[TensorId]) -> HaltedAt:
        """Return how far this rank has come, and which tensors lie in the memory of each of ``written``."""
        memory: dict[TensorId, int] = {}
        families: dict[int, list[TensorId]] = {}
        for number, held in self._tensors.items():
            if isinstance(held, RankTensor):
                memory[number] = id(held.root.version)
                families.setdefault(memory[number], []).append(number)
        wanted = {memory[number] for number in written if number in memory}
        return HaltedAt(self._left[0].number if self._left else self._next, [families[each] for each in wanted])

    def resume(
        self, refused: Mapping[int, str], lost: Mapping[TensorId, str], doubted: Collection[Write]
    ) -> dict[TensorId, str]:
        """Go on from where this rank has halted; as `run`.

        refused: operations, by their numbers, that are not done, and why. lost: their results, which it may have.
        doubted: writes of which a repair may ask whether this rank has done them; of no others before the last refused.
        """
        for number in lost.keys() & self._tensors.keys():
            self.give_up(number, lost[number])
        now = self._undone_before(self._next)
        self._undone += [
            now._replace(end=each + 1) if each == now.first else Undone(each, each + 1)
            for each in refused
            if each >= now.first
        ]
        self._undone = [each for each in self._undone if any(map(each.has, doubted))]
        left, self._left = self._left, []
        return self._go_on(left, refused)

    def give_up_below(self, decided: int) -> None:
        """Give up operations whose failures the controller has settled: those below this number.

        Every call says so, since an interrupt may have kept the call that settled them from this rank.
        """
        undone = self._undone_before(decided)
        if undone.first >= decided:
            return
        self._undone.append(undone)
        self._next = max(self._next, decided)
        if self._left:
            left, self._left = self._left, []
            refused = {at: str(self._halted_by) for each in left for at in range(each.first, each.end)}
            self._go_on(left, refused)

    def _undone_before(self, end: int) -> Undone:
        if not self._left:
            return Undone(self._next, end)
        now = self._left[0]
        return Undone(now.number, end, now.done if now.replay is not None else 0)

    def undone(self) -> list[Undone]:
        """Return the operations that this rank will never do and that matter since it last agreed with the others."""
        return self._undone

    def _go_on(self, left: Sequence[Left], refused: Mapping[int, str]) -> dict[TensorId, str]:
        failed: dict[TensorId, str] = {}
        for at, each in enumerate(left):
            try:
                failed.update(self._do(each, refused))
            except OperationFailed as failure:
                rest = each._replace(done=failure.within, run=self._cut_off)
                self._left, self._halted_by = [rest, *left[at + 1 :]], failure
                raise
            self._free(each.freed)
        return failed

    def _do(self, left: Left, refused: Mapping[int, str]) -> dict[TensorId, str]:
        """Do the rest of a batch, or of a step. Raises: OperationFailed at the first that fails here."""
        failed: dict[TensorId, str] = {}
        self._cut_off = None
        step = self._steps[left.replay.number] if left.replay is not None else None
        if left.replay is not None and step is not None and not left.done:
            self._name_inputs(left.replay)
            if left.search is None and left.first not in refused:
                left = left._replace(run=step.begin(self._tensors))
        run = left.run if left.first not in refused else None
        ends = step.recording.ends if step is not None else itertools.repeat(())
        uses = zip(left.uses, left.lines, ends, strict=False)
        with torch.no_grad():
            for index, (use, line, ended) in enumerate(itertools.islice(uses, left.done, None), left.done):
                number = left.first if step is not None else left.first + index
                try:
                    if run is not None:
                        frame_at(line, self._name(use))(run.do, index, use, self._run, self._tensors)
                    else:
                        if step is not None:
                            step.trace(StepTrace.begin, use)
                        self._do_one(use, line, refused.get(number, ""), left.search, index, failed)
                        if step is not None:
                            varies = left.replay is not None and index in left.replay.numbers
                            step.trace(StepTrace.end, use, self._name(use), self._operations.lowered, varies=varies)
                except BaseException as error:
                    why = str(error) if isinstance(error, NotMade) else f"{type(error).__name__}: {error}"
                    done = index
                    if step is not None:
                        done += isinstance(error, KeyboardInterrupt) and self._has_stepped(left.uses, index)
                        step.forget(plan=False)
                        if run is not None:  # its tensors so far are there, whether this rank goes on or not
                            run.keep(self._tensors, done)
                            self._cut_off = run
                    raise OperationFailed(
                        number, self._name(use), name_code_line(line), why, done, kind_of(error)
                    ) from error
                for name in ended if run is None else ():
                    self._tensors.pop(name, None)
            if left.search is not None and not all(at in refused for at in range(left.first, left.end)):
                self._tell(left, failed)
        if run is not None:
            run.keep(self._tensors, len(left.uses))
        elif step is not None:
            step.finish()
        return failed if left.replay is None else self._name_results(left.replay, failed)

    def _do_one(
        self, use: Use, line: CodeLine, refused: str, search: Search | None, index: int, failed: dict[TensorId, str]
    ) -> None:
        if refused:
            self._fail(use, refused, {})
            return
        try:
            if search is None or use.template == WAIT:
                frame_at(line, self._name(use))(self._run, use)
            else:
                frame_at(line, self._name(use))(self._run_searched, use, search, index)
        except NotMade as refusal:
            # a write that nobody does has to be told; and where this rank alone lacks a tensor, others wait for it
            if not use.results or any(number not in self._tensors for number in use.tensors):
                raise
            self._fail(use, str(refusal), failed)

    def _tell(self, left: Left, failed: dict[TensorId, str]) -> None:
        """Report the finds of all ranks. It waits for all of them, so it can be cut off as operations are."""
        assert left.search is not None
        try:
            left.search.tell(failed, left.first, left.replay is not None)
        except BaseException as error:
            why, count = f"{type(error).__name__}: {error}", len(left.uses)
            raise OperationFailed(left.end - 1, "detect_anomaly", "", why, count, kind_of(error)) from error

    def _name_inputs(self, replay: Replay) -> None:
        self._turn, self._waits = replay.turn, 0
        for name, number in zip(self._steps[replay.number].recording.inputs, replay.inputs, strict=True):
            self._tensors[name] = self._tensors.get(number) or Failed(GONE)

    def _name_results(self, replay: Replay, failed: Mapping[TensorId, str]) -> dict[TensorId, str]:
        """Give the results of a step their numbers; return the failures of tensors that are there afterwards."""
        named = dict(zip(self._steps[replay.number].recording.results, replay.results, strict=True))
        for name, number in named.items():
            self._tensors[number] = self._tensors.get(name) or Failed(GONE)
        for name in [name for name in self._tensors if name < 0]:
            del self._tensors[name]
        return {named.get(number, number): why for number, why in failed.items() if number >= 0 or number in named}

    def _free(self, numbers: Sequence[TensorId]) -> None:
        if self._left:  # it may be needed for what is left
            self._left.append(Left(self._left[-1].end, (), (), numbers))
            return
        for number in numbers:
            if self._tensors.pop(number, None) is None:
                self._steps.pop(number, None)

    def _wait_for_all(self, gradients: Sequence[TensorId]) -> None:
        """Wait until all ranks are here. gradients: each with its parameter behind it. Raises: RuntimeError."""
        for number in gradients:
            if isinstance(held := self._tensors.get(number), Failed):
                raise RuntimeError(held.why)
        waited = self.lay_like(list(zip(gradients[::2], gradients[1::2], strict=True)))
        for axis in range(self.mesh.ndim):
            if axis not in waited:
                dist.all_reduce(torch.zeros(1, device=self.mesh.device_type), group=self.mesh.get_group(axis))
        self._waits += 1
        if self._waits == 2:
            self._waited = self._turn
            held = self._tensors.get(gradients[1]) if gradients else None
            if isinstance(held, RankTensor):
                part = held.tensor._local_tensor
                self._waited_for = weakref.ref(part), part._version

    def _has_stepped(self, uses: Sequence[Use], index: int) -> bool:
        """Whether the operation behind the second wait was done: an interrupt within it is raised when it is over."""
        if index == 0 or uses[index - 1].template != WAIT or self._waits != 2 or self._waited_for is None:
            return False
        part, version = self._waited_for[0](), self._waited_for[1]
        return part is not None and bool(part._version != version)

    def stepped(self) -> int:
        """Return the turn in which all ranks last began to step with an optimizer."""
        return self._waited

    # ---- single operations -------------------------------------------------------------------------------------------

    def give_up(self, number: TensorId, why: str) -> None:
        """Note that a tensor could not be made, here as on the other ranks."""
        self._tensors[number] = Failed(why)

    def lay_like(self, pairs: Sequence[tuple[TensorId, TensorId]]) -> set[int]:
        """Lay the first tensor of each pair out as the second; a tensor that has failed is left as it is.

        A tensor that shares memory with views, or may, stays where it is, and only its sum is done.
        Returns: the axes along which all ranks have waited for each other by that.
        """
        found = [(self._tensors.get(number), self._tensors.get(other)) for number, other in pairs]
        both = [(a, b) for a, b in found if isinstance(a, RankTensor) and isinstance(b, RankTensor)]
        wanted = [(held, self._operations.read(held), like.tensor.placements) for held, like in both]
        families: Counter[int] = Counter()
        if any(tensor.placements != placements for _, tensor, placements in wanted):
            families.update(id(each.family) for each in self._tensors.values() if isinstance(each, RankTensor))
        end_shared_sums([held for held, _, _ in wanted if families[id(held.family)] > 1])
        return lay_all_out(
            [(tensor, placements) for held, tensor, placements in wanted if families[id(held.family)] <= 1]
        )

    def _name(self, use: Use) -> str:
        known = self._templates.get(use.template)
        return known.operator if known is not None else "optimizer.step" if use.template == WAIT else "it"

    def _compile(self, number: int) -> CompiledTemplate:
        if number not in self._templates:
            raise RuntimeError("this rank was interrupted before it was told what it is")
        try:
            made = self._compiled[number] = CompiledTemplate(self._templates[number], self.mesh.device_type)
        except AttributeError as error:
            raise NotMade(f"the ranks do not know it: {error}") from error
        return made

    def _run(self, use: Use) -> None:
        if use.template == WAIT:
            self._wait_for_all(use.tensors)
            return
        template = self._compiled.get(use.template) or self._compile(use.template)
        results = self._operations.do(template, use, [self._operand(number) for number in use.tensors])
        if len(results) < len(use.results):
            raise RuntimeError(f"it gave {len(results)} tensors on this rank, where {len(use.results)} were foreseen")
        self._tensors.update(zip(use.results, results, strict=False))

    def _run_searched(self, use: Use, search: Search, index: int) -> None:
        """Do an operation as `_run` does, and search it; the values of an empty tensor are left out."""
        search.note_operands(index, [self._of(number) for number in use.tensors])
        self._run(use)
        template = self._compiled[use.template]
        written = use.tensors if template.written else ()
        if "empty" not in template.name:
            search.note_results(index, [self._of(number) for number in (*use.results, *written)])

    def _operand(self, number: TensorId) -> RankTensor:
        found = self._tensors.get(number)
        if isinstance(found, Failed):
            raise NotMade(found.why)
        if found is None:
            raise NotMade(self.why_halted or GONE)
        return found

    def _of(self, number: TensorId) -> DTensor:
        return self._operations.read(self._operand(number))

    def _fail(self, use: Use, why: str, failed: dict[TensorId, str]) -> None:
        for number in use.results:
            self.give_up(number, why)
            failed[number] = why
