"""The attributes that code outside of a class sets on its objects, as far as syntax trees without types tell.

An object is whole when its constructor returns. Who puts a callable or a part into it later hides from a reader of the
class where that comes from, and when it is there. An attribute counts where one class alone has one of that name.
Records (dataclasses, messages, errors) do not count: they are data, for others to fill.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

RECORDS = frozenset({"Struct", "NamedTuple", "TypedDict", "Protocol", "Enum", "Exception", "dataclass"})
Trees = list[tuple[Path, ast.Module]]


class _Declared(NamedTuple):
    owners: dict[str, set[str]]
    """The classes that have an attribute, by its name."""
    parts: set[str]
    """The attributes for a callable, or for an object of a class of ours that is no record."""
    without_value: set[str]
    """The attributes that are annotated on ``self`` without a value."""
    plain: set[str]
    """The classes that are no records."""


def set_from_outside(trees: Trees) -> tuple[list[str], list[str]]:
    """Return the places that set an attribute of an object of another class, and the attributes for parts among these.

    Parts are callables, and objects of classes of ours. The second list also has the attributes without a value.
    """
    declared = _declared(trees)
    found = [(f"{path.name}:{line}", name) for path, tree in trees for line, name in _set_in(path, tree, declared)]
    late = {name for _, name in found if name.rpartition(".")[2] in declared.parts}
    return [f"{place}: {name}" for place, name in found], sorted(late | declared.without_value)


def _set_in(path: Path, tree: ast.Module, declared: _Declared) -> Iterator[tuple[int, str]]:
    words, inside = _words(path.read_text()), list[str]()

    def visit(node: ast.AST) -> Iterator[tuple[int, str]]:
        inside.append(getattr(node, "name", "") if isinstance(node, ast.ClassDef) else "")
        if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store) and not _is_own(node):
            owners = declared.owners.get(node.attr, set())
            is_near = isinstance(node.value, ast.Attribute) or owners <= words  # else of a class of other people
            if len(owners) == 1 and is_near and owners <= declared.plain.difference(inside):
                yield node.lineno, f"{min(owners)}.{node.attr}"
        for child in ast.iter_child_nodes(node):
            yield from visit(child)
        inside.pop()

    return visit(tree)


def _declared(trees: Trees) -> _Declared:
    classes = {node.name: node for _, tree in trees for node in ast.walk(tree) if isinstance(node, ast.ClassDef)}
    found = _Declared({}, set(), set(), {name for name in classes if not _is_record(name, classes)})
    for name, node in classes.items():
        for each in ast.walk(node):
            types = ""
            match each:
                case ast.AnnAssign(target=ast.Attribute(attr=attribute) as target) if _is_own(target):
                    types = ast.unparse(each.annotation)
                    found.without_value.update({f"{name}.{attribute}"} if each.value is None else ())
                case ast.Assign(targets=[ast.Attribute(attr=attribute) as target]) if _is_own(target):
                    types = ast.unparse(each.value.func) if isinstance(each.value, ast.Call) else ""
                case ast.Attribute(attr=attribute, ctx=ast.Store()) if _is_own(each):
                    pass
                case ast.AnnAssign(target=ast.Name(id=attribute)) if each in node.body:
                    types = ast.unparse(each.annotation)
                case _:
                    continue
            found.owners.setdefault(attribute, set()).add(name)
            if name in found.plain and _words(types) & {*found.plain, "Callable"}:
                found.parts.add(attribute)
    return found


def _is_record(name: str, classes: dict[str, ast.ClassDef]) -> bool:
    if name in RECORDS or name.endswith("Error"):
        return True
    heads = [*classes[name].bases, *classes[name].decorator_list] if name in classes else []
    return any(_is_record(word, classes) for head in heads for word in _words(ast.unparse(head)) - {name})


def _is_own(node: ast.expr) -> bool:
    return isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id in ("self", "cls")


def _words(text: str) -> set[str]:
    return set(re.findall(r"\w+", text))
