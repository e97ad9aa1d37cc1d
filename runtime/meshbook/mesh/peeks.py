"""Peeks: the values of an expression on ranks that may be busy, with the places at which the ranks were."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from meshbook.calls.rank_state import Peeked
from meshbook.controller.queries import StackQuestion, ask_rank
from meshbook.errors import CallFailed, Failure, UsageError, WorkerLost
from meshbook.mesh.proc_view import ProcView, ask
from meshbook.shape.value_mesh import ValueMesh
from meshbook.stacks.mesh_stacks import predicate
from meshbook.values.pickling import loads
from meshbook.wire.replies import decode_failure

TIMEOUT_S = 2.0
"""The longest that a peek holds a rank up, unless another time is asked for."""
TIMEOUT_MAX_S = 60.0
_HEARD_S = 0.5
"""The time for control threads to answer; one that does not waits for native code that holds the GIL."""
_MARGIN_S = 2.5
"""The time beyond that of the expression: for other peeks, reaching the main thread, ending the expression, the way."""
_DUMP_S = 0.5


class NoValue(NamedTuple):
    """The place of a rank in a ValueMesh for which a peek got no value, and the reason."""

    why: str

    def __repr__(self) -> str:
        return f"no value: {self.why}"


class Peeks(NamedTuple):
    """The answers to a peek."""

    values: ValueMesh[Any]
    """A value for each member; `NoValue` where there is none."""
    places: Mapping[int, str]
    """The places of the ranks that gave a value: ``cell 7, line 4``, ``idle``."""
    failures: Sequence[Failure]
    lost: WorkerLost | None

    @property
    def failed(self) -> set[int]:
        """The ranks on which the expression has failed, or that have ended."""
        return {failure.rank for failure in self.failures} | set(self.lost.ranks if self.lost is not None else ())

    @property
    def error(self) -> CallFailed | WorkerLost | None:
        """The error of ranks that have ended, else of those on which the expression has failed."""
        partial = {rank: self.values.get(rank) for rank in self.places}
        if self.lost is not None:
            return WorkerLost.of([self.lost], partial=partial)
        return CallFailed(self.failures, partial=partial) if self.failures else None

    def checked(self) -> ValueMesh[Any]:
        """Return the values. Raises: `error`."""
        if (error := self.error) is not None:
            raise error
        return self.values


def peek(procs: ProcView, expression: str, timeout_s: float = TIMEOUT_S) -> Peeks:
    """Evaluate an expression on each member in the midst of what it runs; see `meshbook.worker.peek`.

    Raises: UsageError for a time that makes no sense, MeshStoppedError, LayoutError.
    """
    if not 0 < timeout_s <= TIMEOUT_MAX_S:
        raise UsageError(f"a peek may take more than 0 s and up to {TIMEOUT_MAX_S:g} s; got {timeout_s:g}.")
    mesh, questions = procs._mesh, procs._controller.questions
    mesh.check_usable()
    heard = list(ask(procs, str, "where", timeout_s=_HEARD_S))
    told = questions.gather(mesh, heard, ask_rank("peek", expression, timeout_s), Peeked, timeout_s + _MARGIN_S)
    ranks = procs.ranks
    silent = [rank for rank in ranks if rank not in told and rank not in mesh.lost]
    reasons: dict[int, str] = {}
    if silent:  # where they are is read from outside
        stacks = procs._controller.stacks(mesh, procs._members, StackQuestion(timeout_s=_DUMP_S))
        reasons = {rank: predicate(stacks[rank]) for rank in silent}
    values: list[object] = []
    places: dict[int, str] = {}
    failures: list[Failure] = []
    for rank in ranks:
        if rank not in told:
            values.append(NoValue(f"rank {rank} has ended" if rank in mesh.lost else reasons[rank]))
        elif (answer := told[rank]).failure:
            failures.append(decode_failure(answer.failure))
            values.append(NoValue(f"{failures[-1].ename}: {failures[-1].evalue}"))
        elif answer.missed:
            values.append(NoValue(answer.missed))
        else:
            values.append(loads(answer.head, answer.buffers))
            places[rank] = answer.place
    lost = [mesh.lost[rank] for rank in ranks if rank in mesh.lost]
    return Peeks(ValueMesh(procs._members, values), places, failures, WorkerLost.of(lost) if lost else None)
