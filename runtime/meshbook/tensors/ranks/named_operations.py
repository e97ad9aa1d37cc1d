"""Tensors of one rank by their numbers, and single operations on them, or the reason why one cannot be done."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import NamedTuple

from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from meshbook.tensors.messages.anomalies import Search
from meshbook.tensors.messages.operations import WAIT, Template, TensorId, Use
from meshbook.tensors.ranks.operator_rules import CompiledTemplate
from meshbook.tensors.ranks.partial_sums import end_shared_sums, lay_all_out
from meshbook.tensors.ranks.rank_operations import Operations, RankTensor


class Failed(NamedTuple):
    """Stands for the result of an operation that failed."""

    why: str


class NotMade(Exception):
    """An operation fails on all ranks alike, before any has begun with it."""


GONE = "a tensor that it needs is not on this rank"


class NamedOperations:
    """The mesh tensors of one process, for one device mesh, and how an operation is done on them."""

    def __init__(self, mesh: DeviceMesh) -> None:
        self.mesh, self._operations = mesh, Operations(mesh)
        self._tensors: dict[TensorId, RankTensor | Failed] = {}
        self._templates: dict[int, Template] = {}
        self._compiled: dict[int, CompiledTemplate] = {}

    @property
    def why_halted(self) -> str:
        """Empty while this rank goes on."""
        return ""

    def give_up(self, number: TensorId, why: str) -> None:
        """A tensor could not be made, here as on the other ranks."""
        self._tensors[number] = Failed(why)

    def lay_like(self, pairs: Sequence[tuple[TensorId, TensorId]]) -> set[int]:
        """Lay the first tensor of each pair out as the second; what has failed is left as it is.

        What views share, or may share, memory with stays where it is: it is no sum any more, and that is all.
        Returns: axes along which all ranks have waited for each other by that.
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
        return known.operator if known is not None else "a step of an optimizer" if use.template == WAIT else "it"

    def _compile(self, number: int) -> CompiledTemplate:
        if number not in self._templates:
            raise RuntimeError("this rank was interrupted before it was told what it is")
        try:
            made = self._compiled[number] = CompiledTemplate(self._templates[number], self.mesh.device_type)
        except AttributeError as error:
            raise NotMade(f"the ranks do not know it: {error}") from error
        return made

    def _run(self, template: CompiledTemplate, use: Use) -> None:
        results = self._operations.do(template, use, [self._operand(number) for number in use.tensors])
        if len(results) < len(use.results):
            raise RuntimeError(f"it gave {len(results)} tensors on this rank, where {len(use.results)} were foreseen")
        self._tensors.update(zip(use.results, results, strict=False))

    def _run_searched(self, use: Use, search: Search, index: int) -> None:
        """As `_run`. What memory happens to hold, in a tensor that is empty, is nobody's mistake."""
        template = self._compiled.get(use.template) or self._compile(use.template)
        search.note_operands(index, [self._of(number) for number in use.tensors])
        self._run(template, use)
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
