"""What a rank has yet to do: batches of operations and recorded steps, whole or from where it has halted."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from meshbook.tensors.messages.anomalies import Search
from meshbook.tensors.messages.issued_lines import CodeLine, each_line
from meshbook.tensors.messages.operations import Recording, Replay, TensorId, Use
from meshbook.tensors.ranks.lowered_operations import Lowered
from meshbook.tensors.ranks.step_plans import StepPlan, StepRun
from meshbook.tensors.ranks.step_tracing import StepTrace, Untraceable

TRACED_FROM = 3
"""So often a step is done as always before there is a plan: by then it is known what its operations come to."""
TRACED_AT_MOST = 10
"""What lies in another way each time needs no more plans."""


class Left(NamedTuple):
    """Operations that are to be done, one behind the other, and what nobody needs after them."""

    first: int
    """The number of the first operation; a recorded step has but one number."""
    uses: Sequence[Use]
    lines: Sequence[CodeLine]
    freed: Sequence[TensorId]
    search: Search | None = None
    replay: Replay | None = None
    done: int = 0
    """How many of the uses are done."""
    run: StepRun | None = None
    """Of a step that was cut off while it was done as planned."""

    @property
    def number(self) -> int:
        """Of the operation that is done next."""
        return self.first if self.replay is not None else self.first + self.done

    @property
    def end(self) -> int:
        """The number behind the last."""
        return self.first + (1 if self.replay is not None else len(self.uses))


class KnownStep:
    """A recorded step as this rank does it each time."""

    def __init__(self, recording: Recording) -> None:
        self.recording = recording
        self.uses = list(map(Use._make, recording.uses))
        self.lines = list(each_line(recording.lines, len(self.uses)))
        self._plan: StepPlan | None = None
        self._trace: StepTrace | None = None
        self._times = self._traced = 0

    def begin(self, tensors: Mapping[TensorId, Any]) -> StepRun | None:
        """Do it as planned. None where it is done as always: there is no plan, or tensors lie in another way."""
        run = self._plan.begin(tensors) if self._plan is not None else None
        self._trace = None
        if run is None:
            self._plan, self._times = None, self._times + 1
            if self._times >= TRACED_FROM and self._traced < TRACED_AT_MOST:
                self._traced += 1
                try:
                    self._trace = StepTrace(self.recording, self.uses, tensors)
                except Untraceable:
                    pass
        return run

    def look_before(self, use: Use) -> None:
        """An operation is about to be done as always."""
        if self._trace is not None:
            try:
                self._trace.begin(use)
            except Untraceable:
                self._trace = None

    def look_after(self, use: Use, operator: str, lowered: Lowered | None, *, varies: bool) -> None:
        """It was done. lowered: what it came to, if that is known. varies: its numbers are others each time."""
        if self._trace is not None:
            try:
                self._trace.end(use, operator, lowered, varies=varies)
            except Untraceable:
                self._trace = None

    def finish(self) -> None:
        """It was done as always, to its end."""
        if self._trace is not None:
            self._plan, self._trace = self._trace.finish(), None

    def forget(self, *, plan: bool) -> None:
        """It was cut off. plan: groups are others."""
        self._trace = None
        if plan:
            self._plan, self._times = None, 0
