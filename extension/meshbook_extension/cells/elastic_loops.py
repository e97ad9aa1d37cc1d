"""The bodies of elastic loops in cells, which are put into a block that lets them end when a rank ends.

    for batch in meshbook.elastic(...):        for batch in (loop := meshbook.elastic(...)):
        BODY                              ->       with attempt(loop):
                                                       BODY
                                               del loop
Lines stay as they are, and break, continue, else and return keep their meanings.
A module of its own because nothing else changes the syntax trees of cells.
"""

from __future__ import annotations

import ast
import contextlib
from typing import Any

_ATTEMPT = f"__import__({__name__!r}, fromlist=['attempt']).attempt"
_LOOP = "_elastic_loop"


class ElasticLoops(ast.NodeTransformer):
    """A transformer of the syntax trees of cells."""

    def visit_For(self, node: ast.For) -> ast.AST | list[ast.AST]:
        self.generic_visit(node)
        called = node.iter.func if isinstance(node.iter, ast.Call) else None
        if getattr(called, "attr", getattr(called, "id", "")) != "elastic":
            return node
        name = f"{_LOOP}_{node.lineno}_{node.col_offset}"
        block = ast.parse(f"{_ATTEMPT}({name})", mode="eval").body
        node.iter = ast.NamedExpr(ast.Name(name, ast.Store()), node.iter)
        node.body = [ast.With([ast.withitem(block, None)], node.body)]
        end = ast.copy_location(ast.Delete([ast.Name(name, ast.Del())]), node)
        return [ast.fix_missing_locations(each) for each in (node, end)]


def attempt(loop: Any) -> contextlib.AbstractContextManager[None]:
    """Return the block for the body; one without effect where another function was called elastic."""
    return loop.attempt() if hasattr(loop, "attempt") else contextlib.nullcontext()
