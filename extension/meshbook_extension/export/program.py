"""The parts of a record that belong into a script: cells on ranks, and the notebook's own statements that feed them.

%%mesh cells, %mesh eval, %mesh profile         code of ranks, always
%mesh push, scatter, broadcast, pull, gather    values that cross, where they matter to ranks
statements of the notebook                      those whose names are pushed, and those that make their names
"""

from __future__ import annotations

import ast
import re
import shlex
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import TypeAlias

from meshbook.errors import UsageError
from meshbook.formatting import format_ranks, format_sizes
from meshbook.shell.scripts import read_script
from meshbook_extension.cells.record import GIVEN, ExecutedCell, NamedTarget, bound_by
from meshbook_extension.cells.run import MESH_CELL
from meshbook_extension.cells.transformers import as_ranks_do, drop_local
from meshbook_extension.export.mesh_tensors import MeshNames
from meshbook_extension.export.plain_python import Names, PlainCell, Problem, ipython_call, lines_of, names_of
from meshbook_extension.notebook.grammar import Arguments, parse

ReadCommand: TypeAlias = Callable[[str], Arguments | None]
"""Reads the line behind ``%mesh``; None for one that is no command."""
CROSSING = frozenset({"push", "scatter", "broadcast", "pull", "gather"})
CUTS = frozenset({"axis", "dim"})
"""The pairs of scatter and gather that name no ranks."""
ON_RANKS = frozenset({"eval", "profile"})
INSTEAD = {
    "restore": "call torch.distributed.checkpoint.load in a cell of the ranks",
    "sync": "put the modules beside the script",
}
"""Commands that a script would need and cannot have."""
_CROSSES = re.compile(rf"%mesh\s+(?:{'|'.join(CROSSING | ON_RANKS)})\b")
_RUNS_CELL = frozenset({"time", "timeit", "capture", "prun"})
RANDOM = re.compile(r"rand|seed|\bnn\.|init|shuffle|Dropout|multinomial")
"""The code that may draw random numbers."""
NOTHING = "no cell has run on a mesh, so there is nothing to export. Run one: %%mesh above a cell"
LEFT_OUT = "leave it out: %mesh export FILE CELLS"


@dataclass
class CellPart:
    """A part of a cell: code of ranks, a statement of the notebook, or a command of ``%mesh``."""

    cell: ExecutedCell
    kind: str
    """``ranks``, ``local``, or the name of a command of `CROSSING`."""
    source: str
    """The text as it was executed, for the proof."""
    line: int
    """The number of lines above it in its cell."""
    plain: PlainCell | None = None
    target: NamedTarget | None = None
    names: Names = field(default_factory=lambda: Names(frozenset(), frozenset()))
    given: tuple[str, ...] = ()
    """The names that cross, as the ranks call them."""
    taken: str = ""
    """The notebook's name for a pulled value."""
    pairs: dict[str, str] = field(default_factory=dict)
    is_last: bool = False
    """Whether it is the last statement of its cell, whose value the notebook shows."""
    is_script: bool = False
    """Whether it is a script that was run, whose last value nothing shows."""

    @property
    def needs(self) -> frozenset[str]:
        """The notebook's names that ranks take from it."""
        return frozenset(self.given if self.kind in ("push", "scatter") else ())

    @property
    def makes(self) -> frozenset[str]:
        """The notebook's names that it binds."""
        return frozenset({self.taken} - {""}) if self.kind != "local" else self.names.bound


class RecordedProgram:
    """The parts in their order, the mesh that they ran on, and the lines that cannot be exported."""

    def __init__(
        self,
        cells: Sequence[ExecutedCell],
        others: Sequence[ExecutedCell],
        read: ReadCommand,
        current: NamedTarget | None,
        *,
        chosen: bool,
    ) -> None:
        """others: the cells that are not exported. current: the notebook's mesh, on which mesh tensors are.

        chosen: whether a person has chosen the cells.

        Raises: UsageError where no cell has run on a mesh.
        """
        self.problems: list[Problem] = []
        self.notes: list[str] = []
        """The cells that are left out, in words."""
        self._read = read
        self._all_names = {name for cell in cells for name in bound_by(cell.code)}
        self.mesh = self._find_mesh(cells, current)
        parts = [part for cell in self._fitting(cells, chosen=chosen) for part in self._parts_of(cell)]
        self.tensors = MeshNames(part for part in parts if part.kind == "local")
        self.parts = self._needed(parts)
        self.mesh = next((part.target for part in self.parts if part.target), self.mesh)  # with the axes of the start
        if not self.parts and not self.problems:
            raise UsageError(NOTHING)
        exported = {id(part.cell) for part in parts}
        self._check_names([cell for cell in [*cells, *others] if id(cell) not in exported])
        self.makes_group = False
        """Whether the first cell on ranks makes the process group itself."""
        self._check_groups()
        self.packages = sorted({name for part in parts if part.plain for name in part.plain.packages})

    @property
    def command(self) -> str:
        """The command that runs the script, without its file."""
        hosts, each = self.mesh.hosts, f"--nproc-per-node {self.mesh.size // self.mesh.hosts}"
        if hosts == 1:
            return f"torchrun {each}"
        return f"torchrun --nnodes {hosts} {each} --rdzv-backend c10d --rdzv-endpoint HOST:29500"

    def all_problems(self) -> list[Problem]:
        """Return each line that cannot be exported, once, in order."""
        found = [*self.problems, *(each for part in self.parts if part.plain for each in part.plain.problems)]
        return sorted(set(found))

    # ---- cells -----------------------------------------------------------------------------------------------------

    def _find_mesh(self, cells: Sequence[ExecutedCell], current: NamedTarget | None) -> NamedTarget:
        for cell in reversed(cells):
            if not cell.error and cell.targets:
                return cell.targets[-1]
        if current is None:
            raise UsageError(NOTHING)
        return current

    def _fitting(self, cells: Sequence[ExecutedCell], *, chosen: bool) -> Iterator[ExecutedCell]:
        """Yield the cells that ended well and ran on the mesh, or on none."""
        failed, elsewhere = [], []
        for cell in cells:
            matters = cell.on_ranks is not None or _CROSSES.search(cell.text)
            targets = cell.targets if matters else ()
            others = [each for each in targets if (each.id, each.size) != (self.mesh.id, self.mesh.size)]
            if cell.error and matters:
                failed.append(cell.number)
                if chosen:
                    self.refuse(cell, 1, f"it failed with {cell.error}", f"run it again, or {LEFT_OUT}")
            elif cell.error:
                continue
            elif others and (chosen or others[0].id == self.mesh.id):
                was, now = format_sizes(others[0].axes), format_sizes(self.mesh.axes)
                text = f'it ran on "{others[0].mesh}" with {was}, later ones on "{self.mesh.mesh}" with {now}'
                self.refuse(cell, 1, text, "export the cells of one mesh: %mesh export FILE CELLS")
            elif others:
                elsewhere.append(cell.number)
            else:
                yield cell
        if failed:
            self.notes.append(f"left out, since they failed: cells {format_ranks(sorted(set(failed)))}")
        if elsewhere:
            self.notes.append(f"left out, since they ran on another mesh: cells {format_ranks(sorted(set(elsewhere)))}")

    def refuse(self, cell: ExecutedCell, line: int, text: str, instead: str) -> None:
        """Note a line that cannot be exported."""
        self.problems.append(Problem(cell.number, line, text, instead))

    def _parts_of(self, cell: ExecutedCell) -> Iterator[CellPart]:
        on_ranks = cell.on_ranks
        if on_ranks is None:
            yield from self._local_parts(cell)
        elif cell.targets:
            arguments = parse(MESH_CELL, on_ranks.line)
            part = self._rank_part(cell, on_ranks.code, on_ranks.lines_above, cell.targets[0])
            part.taken = arguments.text("--out") or ""
            yield part

    def _rank_part(self, cell: ExecutedCell, code: str, line: int, target: NamedTarget) -> CellPart:
        plain = PlainCell(code, cell.number, line, self._all_names)
        return CellPart(cell, "ranks", code, line, plain, target, names_of(plain.text))

    def _local_parts(self, cell: ExecutedCell) -> Iterator[CellPart]:
        """Yield the statements of a cell of the notebook; those that share a line are one."""
        text = as_ranks_do("".join(drop_local(lines_of(cell.text))))
        lines = lines_of(text)
        targets = list(cell.targets)
        group: list[ast.stmt] = []
        first = 0
        for statement, following in zip(body := ast.parse(text).body, [*body[1:], None], strict=True):
            group.append(statement)
            if following is not None and following.lineno <= (statement.end_lineno or 0):
                continue
            source = "".join(lines[first : statement.end_lineno])
            call = ipython_call(getattr(statement, "value", None))
            if call is not None and [getattr(word, "value", "") for word in call.args][:1] == ["mesh"]:
                yield from self._command(cell, statement, str(getattr(call.args[1], "value", "")), first, targets)
            else:
                plain = PlainCell(source, cell.number, first, self._all_names)
                yield CellPart(
                    cell, "local", source, first, plain, names=names_of(plain.text), is_last=following is None
                )
            if _has_mesh_inside(group):
                self.refuse(cell, first + 1, "%mesh inside of a block", "write it on a line of its own")
            group, first = [], statement.end_lineno or 0

    def _command(
        self, cell: ExecutedCell, statement: ast.stmt, line: str, above: int, targets: list[NamedTarget]
    ) -> Iterator[CellPart]:
        """Yield the part for a command of ``%mesh``; commands that start, end or look at meshes have none."""
        name, _, rest = line.strip().partition(" ")
        if name == "run":
            yield from self._script_part(cell, line, above, targets)
        if name in INSTEAD:
            self.refuse(cell, above + 1, f"%mesh {name}", INSTEAD[name])
        if name == "save":
            self.notes.append(f"left out: %mesh save of cell {cell.number}; in a script: torch.distributed.checkpoint")
        if name == "pip":
            plain = PlainCell(f"%pip {rest}", cell.number, above)
            yield CellPart(cell, "local", "", above, plain)
        if name not in CROSSING | ON_RANKS or (arguments := self._read(line)) is None:
            return
        at = arguments.text("--at") if name != "broadcast" else None
        pairs = {axis: text for axis, text in arguments.pairs.items() if axis not in CUTS}
        named = ((at,) if at else (), pairs)
        target = next((each for each in targets if (each.words, each.pairs) == named), self.mesh)
        if target in targets:
            targets.remove(target)
        if name == "broadcast":
            target = self.mesh
        part = CellPart(
            cell, name, f"%mesh {line}", above, target=target, given=arguments.words, pairs=dict(arguments.pairs)
        )
        if name in ON_RANKS:
            if name == "eval" and "$" in arguments.tail:
                self.refuse(cell, above + 1, "$ in %mesh eval", "push the value, and use its name")
            part = self._rank_part(cell, arguments.tail, above, target)
        elif name in ("pull", "gather"):
            part.taken = arguments.text("--out") or arguments.words[0]
            for more in arguments.words[1:]:
                yield CellPart(cell, name, "", above, target=target, given=(more,), taken=more)
            part.given = arguments.words[:1]
        elif name == "broadcast":
            part.pairs = {"from": (arguments.text("--from") or "0").removeprefix("rank=")}
        if isinstance(statement, ast.Assign):
            part.taken = getattr(statement.targets[0], "id", "")
        yield part

    def _script_part(self, cell: ExecutedCell, line: str, above: int, targets: list[NamedTarget]) -> Iterator[CellPart]:
        """Yield the text of a script that was run and whose names were kept; others have nothing that cells need."""
        try:
            arguments = self._read(line)
            assert arguments is not None
            script = read_script(shlex.split(arguments.tail), keep=arguments.flag("--keep"))
        except (UsageError, SyntaxError, ValueError) as error:
            self.refuse(cell, above + 1, f"%mesh run: {error}", LEFT_OUT)
            return
        if not script.keep:
            self.notes.append(f"left out: {script.name} of cell {cell.number}, whose names were not kept")
            return
        if not script.path:
            self.refuse(cell, above + 1, "%mesh run -m", "give the file, or leave it out")
            return
        words = ", ".join(map(repr, (script.name, *script.arguments)))
        text = f"import sys\n\nsys.argv = [{words}]\n{script.source.decode()}"
        part = self._rank_part(cell, text, above, targets.pop(0) if targets else self.mesh)
        part.source, part.is_script = f"{text}\npass\n", True  # which shows no value
        yield part

    def _check_groups(self) -> None:
        """Find whether the first cell makes the process group; refuse a later one that would make it twice."""
        on_ranks = [part for part in self.parts if part.kind == "ranks"]
        for part in on_ranks:
            makes = "init_process_group(" in part.source and "is_initialized" not in part.source
            if makes and part is on_ranks[0]:
                self.makes_group = True
            elif makes:
                instead = "there is a group already: write if not dist.is_initialized() above it"
                self.refuse(part.cell, part.line + 1, "init_process_group", instead)
            if "destroy_process_group(" in part.source and part is not on_ranks[-1]:
                self.refuse(
                    part.cell, part.line + 1, "destroy_process_group", "later cells need the group: take it out"
                )

    def _check_names(self, others: Sequence[ExecutedCell]) -> None:
        """Refuse names that ranks use, or that are pushed to them, and that only a cell that is left out binds."""
        on_ranks = {*GIVEN, "mesh", "dist", "torch"}
        in_notebook: set[str] = set()
        for part in self.parts:
            missing = part.needs - in_notebook
            if part.kind == "ranks":
                missing = part.names.used - part.names.bound - on_ranks
            in_notebook |= part.makes
            on_ranks |= part.names.bound if part.kind == "ranks" or self.tensors.has(part) else set(part.given)
            for name in sorted(missing):
                same = [each for each in others if (each.on_ranks is not None) == (part.kind == "ranks")]
                if binding := [each for each in same if name in bound_by(each.code)]:
                    number, instead = binding[-1].number, "export that too, once it has ended well"
                    if any(binding[-1].is_run_again_by(each.cell) for each in self.parts):
                        instead = "that was run again later: run this cell again too, or add --as-run"
                    self.refuse(part.cell, part.line + 1, f"{name} is of cell {number}", instead)

    # ---- dependencies ----------------------------------------------------------------------------------------------

    def _needed(self, parts: list[CellPart]) -> list[CellPart]:
        """Return the parts whose effects reach ranks, in their order."""
        roots = [part for part in parts if part.kind == "local" and self.tensors.has(part)]
        wanted = {name for part in parts for name in part.needs}
        wanted |= {name for part in roots for name in part.names.used | part.names.bound}
        local = [part for part in parts if part.makes or part.kind == "local"]
        size = -1
        while size != len(wanted):
            size = len(wanted)
            for part in local:
                if wanted & (part.makes | (changed_by(part) if part.kind == "local" else set())):
                    wanted |= part.names.used if part.kind == "local" else {part.taken}
        last = max((at for at, part in enumerate(parts) if part.needs or part in roots), default=-1)
        draws = any(RANDOM.search(part.source) for part in local if wanted & part.makes)
        kept = []
        for at, part in enumerate(parts):
            reaches = at <= last and bool(wanted & (part.makes | changed_by(part)))
            if part.kind == "ranks":
                kept.append(part)
                if reaches and part.taken:
                    self.refuse(
                        part.cell, 1, "its value is used in the notebook", "bind it on the ranks, and %mesh pull it"
                    )
            elif part.kind == "local":
                if reaches or part in roots or (draws and at <= last and "seed(" in part.source):
                    kept.append(part)
            elif part.kind in ("pull", "gather"):
                kept += [part] if reaches else []
            else:
                kept.append(part)
        return kept


def changed_by(part: CellPart) -> set[str]:
    """Return the names whose values code changes in place: by an item, an attribute, or a call of a method."""
    tree = ast.parse(part.plain.text if part.plain else "")
    found = set()
    for statement in tree.body:
        for node in ast.walk(statement):
            if isinstance(node, ast.Attribute | ast.Subscript) and isinstance(node.ctx, ast.Store | ast.Del):
                found.add(_root(node))
        if isinstance(statement, ast.Expr) and isinstance(call := statement.value, ast.Call):
            found.add(_root(call.func) if isinstance(call.func, ast.Attribute) else "")
    imported = (node for node in ast.walk(tree) if isinstance(node, ast.alias))
    return found - {"", "torch", "np", "random", *(each.asname or each.name for each in imported)}


def _root(node: ast.AST) -> str:
    while isinstance(node, ast.Attribute | ast.Subscript | ast.Call):
        node = node.func if isinstance(node, ast.Call) else node.value
    return node.id if isinstance(node, ast.Name) else ""


def _has_mesh_inside(statements: Iterable[ast.stmt]) -> bool:
    """Whether a line of ``%mesh`` stands in a block, or below a cell magic that runs the cell."""
    for statement in statements:
        for node in ast.walk(statement):
            call = ipython_call(getattr(node, "value", None))
            words = [str(getattr(word, "value", "")) for word in call.args] if call is not None else [""]
            if (words[0] == "mesh" and node is not statement) or (words[0] in _RUNS_CELL and "%mesh" in words[-1]):
                return True
    return False


def choose_cells(cells: Sequence[ExecutedCell], text: str, *, as_run: bool) -> list[ExecutedCell]:
    """Return the cells that ``3-9,12`` names, all by default; those that were run again at their last place alone.

    as_run: as often as they were run. Raises: UsageError for numbers that no cell has.
    """
    chosen = list(cells)
    if text:
        last = {cell.number: cell for cell in cells}  # numbers begin anew with each kernel
        numbers: set[int] = set()
        for word in text.split(","):
            if not (found := re.fullmatch(r"(\d+)(?:-(\d+))?", word)):
                raise UsageError(f'"{word}" names no cells: write numbers and ranges, as 3-9,12.')
            span = {number for number in last if int(found[1]) <= number <= int(found[2] or found[1])}
            if not span:
                known = f"those of cells {format_ranks(sorted(last))}" if last else "none"
                raise UsageError(f"no cell {word} was executed; the record has {known}.")
            numbers |= span
        chosen = [cell for cell in cells if cell.number in numbers and (as_run or last[cell.number] is cell)]
    if as_run:
        return chosen
    return [
        cell for at, cell in enumerate(chosen) if not any(cell.is_run_again_by(later) for later in chosen[at + 1 :])
    ]
