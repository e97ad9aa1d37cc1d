"""The script of a program, as a person would write it for torchrun: each cell below a comment with its number."""

from __future__ import annotations

import ast
import itertools
import math
import re
from collections.abc import Iterator, Mapping, Sequence

from meshbook.formatting import name_ranks
from meshbook.shape.extent import Extent
from meshbook_extension.cells.record import NamedTarget
from meshbook_extension.export.collectives import collectives_in, functions_with_collectives
from meshbook_extension.export.plain_python import (
    Edits,
    PlainCell,
    has_await,
    indented,
    with_last_value,
)
from meshbook_extension.export.program import RANDOM, CellPart, RecordedProgram, changed_by
from meshbook_extension.export.top import END, write_mesh, write_point, write_top
from meshbook_extension.notebook.targets import RANK, parse_selector

LOCAL = "local_"
"""The beginning of the names of the notebook's own values, where ranks use these names for others."""
RNG = "notebook_rng"
"""The state of torch's generator in the notebook, where rank 0 has one of its own."""
_FUTURE = re.compile(r"^from __future__ import .*\n", re.MULTILINE)
_PLAIN_CALL = re.compile(
    r"abs|bool|dict|enumerate|float|int|len|list|max|min|range|round|set|sorted|str|sum|tuple|zip|Path|SimpleNamespace"
    r"|torch\.device|math\.\w+"
)
"""The functions that give the same on every rank."""


def write_script(program: RecordedProgram, title: str, file: str) -> str:
    """Return the text of the script. Lines that it cannot express are added to the program's problems."""
    return _ScriptWriter(program, file).write(title)


class _ScriptWriter:
    def __init__(self, program: RecordedProgram, file: str) -> None:
        self._file = file
        self.program, self.mesh = program, program.mesh
        self.axes = program.mesh.axes
        self.world_size = program.mesh.size
        local = [part for part in program.parts if part.kind == "local"]
        on_ranks = [part.plain.text for part in program.parts if part.kind == "ranks" and part.plain]
        self._has_tensors = any(program.tensors.has(part) for part in local)
        self._awaiting = sum(map(has_await, on_ranks))
        self._awaited = 0
        self._renamed = self._clashing(local)
        self._collective = functions_with_collectives(on_ranks)
        self._has_drawn = False
        self._shared: set[str] = set()
        """The names of the notebook that all ranks need."""
        self._on_rank_0: set[str] = set()
        """The names of the notebook that rank 0 alone has by now."""
        self._pulled: set[str] = set()
        """The names of the notebook that have values of several ranks by now."""
        for part in program.parts:
            self._shared |= part.needs | (part.names.used if part.kind == "local" and _defines(part) else set())

    def _clashing(self, local: list[CellPart]) -> set[str]:
        """Return the names that mean one value in the notebook and another on the ranks, at any time."""
        parts = self.program.parts
        ranks_own = {name for part in parts if part.kind == "ranks" for name in part.names.bound}
        ranks_own |= {name for part in parts if part.kind in ("scatter", "broadcast") for name in part.given}
        pushed: set[str] = set()
        for at, part in enumerate(parts):
            pushed |= part.needs
            if part.kind == "ranks":
                later = {name for each in parts[at:] if each.kind == "local" for name in each.names.used}
                ranks_own |= pushed & later & changed_by(part)
            elif part.kind == "local":
                following = itertools.takewhile(lambda each: each.kind != "ranks", parts[at:])
                pushed_again = {name for each in following for name in each.needs}
                ranks_own |= pushed & (part.makes | changed_by(part)) - pushed_again
        made = {name for part in parts if part.kind != "ranks" for name in part.makes}
        same = {name for part in local if self.program.tensors.has(part) for name in part.makes}
        same |= {name for part in local if isinstance(_first(part), ast.Import | ast.ImportFrom) for name in part.makes}
        return (made & ranks_own) - same

    def write(self, title: str) -> str:
        blocks, futures = [], set()
        for cell, group in itertools.groupby(self.program.parts, key=lambda part: part.cell):
            parts = list(group)
            body = "".join(self._cell(parts))
            futures.update(_FUTURE.findall(body))
            if body := _FUTURE.sub("", body).strip("\n"):
                blocks.append(f"# In [{cell.number}]: {self._describe(parts)}\n{body}\n")
        body = "\n\n".join(blocks)
        if body.count(RNG) == 1:
            body = re.sub(rf"\n *{RNG} = .*", "", body)
        top = write_top(self.program, body, "".join(sorted(futures)), title, self._file, has_tensors=self._has_tensors)
        return "\n\n".join([top, body, END])

    def _describe(self, parts: list[CellPart]) -> str:
        if all(part.kind != "ranks" for part in parts):
            return "in the notebook"
        ranks = next(part.target.ranks for part in parts if part.target)
        return "all ranks" if len(ranks) == self.world_size else name_ranks(ranks)

    # ---- cells of ranks ----------------------------------------------------------------------------------------------

    def _cell(self, parts: list[CellPart]) -> Iterator[str]:
        """Yield the text of the parts of a cell. Statements of the notebook that rank 0 runs come together."""
        alone: list[CellPart] = []
        for part in parts:
            if part.kind == "local" and self._is_for_rank_0(part):
                alone.append(part)
                continue
            yield from self._on_one_rank(alone)
            alone = []
            if part.target is not None and part.target.axes != self.axes:
                self.axes = part.target.axes
                yield f"{write_point(self.axes)}\n{write_mesh(self.mesh.device, self.axes)}\n"
            if part.kind == "local":
                yield self._local_text(part)
            elif part.kind == "ranks":
                yield self._of_ranks(part)
            else:
                yield self._crossing(part)
        yield from self._on_one_rank(alone)

    def _of_ranks(self, part: CellPart) -> str:
        assert part.plain is not None and part.target is not None
        condition = self._condition(part.target, part.target.pairs)
        if condition:
            self._check_collectives(part, part.plain)
        text = part.plain.text if part.is_script else with_last_value(part.plain.text)
        if has_await(text):
            self._awaited += 1
            name = f"cell_{self._awaited}"
            shared = f"    global {', '.join(sorted(part.names.bound))}\n" if part.names.bound else ""
            run = f"asyncio.run({name}())\n" if self._awaiting == 1 else f"loop.run_until_complete({name}())\n"
            return f"async def {name}():\n{shared}{indented(text)}\n\n{_under(condition, run)}"
        return "".join(_FUTURE.findall(text)) + _under(condition, _FUTURE.sub("", text))

    def _condition(self, target: NamedTarget, pairs: Mapping[str, str]) -> str:
        """Return the condition under which a rank is in the target; empty where all are."""
        ranks = tuple(target.ranks)
        if len(ranks) == self.world_size:
            return ""
        listed = f"rank == {ranks[0]}" if len(ranks) == 1 else f"rank in {ranks}"
        if len(ranks) > 4 and ranks == tuple(range(ranks[0], ranks[-1] + 1)):
            listed = f"rank in range({ranks[0]}, {ranks[-1] + 1})"
        if target.words or not self.axes.keys() >= pairs.keys():
            return listed
        indices: dict[str, Sequence[int]] = {axis: range(size) for axis, size in self.axes.items()}
        conditions = []
        for axis, text in pairs.items():
            found = parse_selector(axis, text, self.axes[axis])
            some = indices[axis][found] if isinstance(found, slice) else [found] if isinstance(found, int) else found
            indices[axis] = some
            where = f"== {some[0]}" if len(some) == 1 else f"in {tuple(some)}"
            conditions += [f'point["{axis}"] {where}'] if len(some) < self.axes[axis] else []
        extent = Extent.of(self.axes)
        points = (dict(zip(indices, each, strict=True)) for each in itertools.product(*indices.values()))
        return " and ".join(conditions) if tuple(map(extent.rank, points)) == ranks else listed

    def _check_collectives(self, part: CellPart, plain: PlainCell) -> None:
        """Refuse a collective of all ranks in a cell that some of them do not run."""
        missing = sorted({*range(self.world_size)}.difference(part.target.ranks if part.target else ()))
        for line, name in collectives_in(ast.parse(plain.text), self._collective):
            plain.refuse(
                line, f"{name} leaves out {name_ranks(missing)}", "give it a group of the others, or run it on all"
            )

    # ---- values that cross -------------------------------------------------------------------------------------------

    def _crossing(self, part: CellPart) -> str:
        assert part.target is not None
        target, name = part.target, part.given[0]
        condition = self._condition(target, {axis: at for axis, at in part.pairs.items() if axis in {*self.axes, RANK}})
        axis = part.pairs.get("axis", next(iter(target.sizes), ""))
        dim = part.pairs.get("dim", "0")
        if part.kind == "broadcast":
            source = part.pairs["from"]
            return f"{name} = broadcast_object({name} if rank == {source} else None, src={source})\n"
        if part.kind == "push":
            copied = [f"{each} = copy.deepcopy({self._own(each)})\n" for each in part.given if each in self._renamed]
            return _under(condition, "".join(copied))
        if part.kind == "scatter":
            count = target.sizes[axis]
            if count != self.axes.get(axis):
                self.program.refuse(
                    part.cell, part.line + 1, f"a scatter along a part of {axis}", "scatter along all of it"
                )
            return _under(condition, f'{name} = take_piece({self._own(name)}, point["{axis}"], {count}, {dim})\n')
        return "".join(self._gathered(part, name, condition, axis, dim))

    def _gathered(self, part: CellPart, name: str, condition: str, axis: str, dim: str) -> Iterator[str]:
        """Yield the lines that bring values of ranks to rank 0, and to all where these need them."""
        assert part.target is not None
        own, target, ranks = self._own(part.taken), part.target, tuple(part.target.ranks)
        if part.kind == "gather":
            step = math.prod([*target.sizes.values()][[*target.sizes].index(axis) + 1 :])
            ranks = tuple(ranks[index * step] for index in range(target.sizes[axis]))
        else:
            self._pulled.add(part.taken)
        listed = "range(world_size)" if ranks == tuple(range(self.world_size)) else f"({', '.join(map(str, ranks))},)"
        value = f"{name} if {condition} else None" if condition else name
        yield f"{own} = gather_objects({value}, {listed})\n"
        if part.kind == "gather":
            yield f"if rank == 0:\n    {own} = join_parts(list({own}.values()), {dim})\n"
        if part.taken in self._shared:
            yield f"{own} = broadcast_object({own})\n"
        else:
            self._on_rank_0.add(part.taken)

    def _own(self, name: str) -> str:
        return f"{LOCAL}{name}" if name in self._renamed else name

    # ---- statements of the notebook ----------------------------------------------------------------------------------

    def _is_for_rank_0(self, part: CellPart) -> bool:
        """Whether one rank must run a statement and give its values to the others."""
        if self._has_tensors or _defines(part):
            return False
        alone = not _is_plain(_first(part)) or bool(part.names.used & self._on_rank_0)
        here = self._on_rank_0
        self._on_rank_0 = here | part.makes | changed_by(part) if alone else here - part.makes
        return alone

    def _on_one_rank(self, parts: list[CellPart]) -> Iterator[str]:
        if not parts:
            return
        body = "".join(map(self._local_text, parts))
        if RANDOM.search(body):
            before = f"torch.set_rng_state({RNG})\n" if self._has_drawn else ""
            body = f"with torch.random.fork_rng():\n{indented(f'{before}{body}{RNG} = torch.get_rng_state()')}\n"
            self._has_drawn = True
        yield f"if rank == 0:\n{indented(body)}"
        shared = sorted({name for part in parts for name in part.makes | changed_by(part)} & self._shared)
        self._on_rank_0.difference_update(shared)
        names = ", ".join(map(self._own, shared))
        if shared:
            several = f"({names})" if len(shared) > 1 else names
            yield f"{names} = broadcast_object({several} if rank == 0 else None)\n"

    def _local_text(self, part: CellPart) -> str:
        """Return a statement of the notebook, with the names that it has in the script."""
        assert part.plain is not None
        text = part.plain.text
        if self._has_tensors:
            text = self.program.tensors.translate(part)
            text = with_last_value(text, "show_once") if part.is_last else text
        text = "\n" * part.source.startswith("\n") + text.lstrip("\n")
        tree, edits = ast.parse(text), Edits(text)
        for node in ast.walk(tree):
            if isinstance(node, ast.Name) and node.id in self._renamed:
                edits.replace(node, self._own(node.id))
            elif isinstance(node, ast.FunctionDef | ast.ClassDef | ast.arg | ast.Lambda):
                clash = self._renamed & ({getattr(node, "name", ""), getattr(node, "arg", "")} | _inside(node))
                for name in sorted(clash):
                    part.plain.refuse(
                        node.lineno, f"{name} is another value on the ranks", "give one of them another name"
                    )
        for node in ast.walk(tree):
            self._check_pulled(part, node)
            match node:
                case ast.Call(func=ast.Attribute(value=ast.Name(id=name), attr="values")) if name in self._pulled:
                    edits.replace(node, f"list({self._own(name)}.values())")
        self._pulled -= part.makes
        return edits.result()

    def _check_pulled(self, part: CellPart, node: ast.AST) -> None:
        """Refuse what a dict of values by rank cannot do."""
        match node:
            case ast.Attribute(value=ast.Name(id=name), attr=attribute) if name in self._pulled and part.plain:
                if attribute not in ("values", "get"):
                    instead = f"use {name}[RANK] or {name}.values(), which a script has too"
                    part.plain.refuse(node.lineno, f"{name}.{attribute} of pulled values", instead)


def _under(condition: str, text: str) -> str:
    return f"if {condition}:\n{indented(text)}" if condition and text else text


def _first(part: CellPart) -> ast.stmt:
    return next(iter(ast.parse(part.plain.text if part.plain else "").body), ast.Pass())


def _defines(part: CellPart) -> bool:
    return isinstance(_first(part), ast.Import | ast.ImportFrom | ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef)


def _inside(node: ast.AST) -> set[str]:
    """Return the names in a function or a class, where they may be its own."""
    return {each.id for each in ast.walk(node) if isinstance(each, ast.Name)}


def _is_plain(statement: ast.stmt) -> bool:
    """Whether a statement gives the same on every rank: constants, and what is computed of them."""
    if not isinstance(statement, ast.Assign | ast.AnnAssign | ast.AugAssign | ast.Pass):
        return False
    calls = (node for node in ast.walk(statement) if isinstance(node, ast.Call | ast.Await))
    return all(isinstance(node, ast.Call) and _PLAIN_CALL.fullmatch(ast.unparse(node.func)) for node in calls)
