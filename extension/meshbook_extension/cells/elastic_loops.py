"""The bodies of elastic loops in cells, which are put into a block that lets them end when a rank ends.

    for batch in meshbook.elastic(...):        with watched(meshbook.elastic(...)) as loop:
        BODY                              ->       for batch in loop:
                                                       with loop.attempt():
                                                           BODY
                                                   del loop
Lines stay as they are, and break, continue, else and return keep their meanings.
"""

from __future__ import annotations

import ast
import contextlib
from collections.abc import Iterable, Iterator
from typing import Any

_WATCHED = f"__import__({__name__!r}, fromlist=['watched']).watched()"
_LOOP = "_elastic_loop"


class ElasticLoops(ast.NodeTransformer):
    """A transformer of the syntax trees of cells."""

    def visit_For(self, node: ast.For) -> ast.AST | list[ast.AST]:
        self.generic_visit(node)
        calls = [each for each in ast.walk(node.iter) if isinstance(each, ast.Call)]
        call = next((each for each in calls if _is_elastic(each)), None)
        if call is None:
            return node
        name = f"{_LOOP}_{node.lineno}_{node.col_offset}"
        node.iter = _Replaced(call, ast.Name(name, ast.Load())).visit(node.iter)
        attempt = ast.parse(f"{name}.attempt()", mode="eval").body
        node.body = [_placed(ast.With([ast.withitem(attempt, None)], node.body), node)]
        watched = ast.parse(_WATCHED, mode="eval").body
        assert isinstance(watched, ast.Call)
        watched.args = [call]
        block = ast.With([ast.withitem(watched, ast.Name(name, ast.Store()))], [node])
        return [_placed(block, node), _placed(ast.Delete([ast.Name(name, ast.Del())]), node)]


def _is_elastic(call: ast.Call) -> bool:
    return getattr(call.func, "attr", getattr(call.func, "id", "")) == "elastic"


class _Replaced(ast.NodeTransformer):
    def __init__(self, old: ast.AST, new: ast.expr) -> None:
        self._old, self._new = old, new

    def visit(self, node: ast.AST) -> Any:
        return self._new if node is self._old else self.generic_visit(node)


def _placed(made: ast.stmt, node: ast.For) -> ast.stmt:
    """Give new nodes the place of the loop."""
    return ast.fix_missing_locations(ast.copy_location(made, node))


class _Other:
    """The loop over the result of another function that is called elastic."""

    def __init__(self, items: Iterable[object]) -> None:
        self._items = items

    def __iter__(self) -> Iterator[object]:
        return iter(self._items)

    def attempt(self) -> contextlib.AbstractContextManager[None]:
        return contextlib.nullcontext()


def watched(items: Any) -> contextlib.AbstractContextManager[Any]:
    """Return the loop, in the block of which it is watched."""
    from meshbook.elasticity.loop import ElasticLoop  # torch comes with it

    return items if isinstance(items, ElasticLoop) else contextlib.nullcontext(_Other(items))
