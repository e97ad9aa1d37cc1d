"""Collectives of all ranks in code: a cell that some ranks do not run must have none, or it waits for them forever.

Calls are found by their names, and by those of the cells' own functions that lead to one. A module of
its own because it reads code alone, and knows neither scripts nor cells.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator, Sequence

_OF_TORCH = re.compile(
    r"(?:dist|distributed|torch\.distributed)\.(?:all_gather|all_gather_into_tensor|all_gather_object|all_reduce|all_to_all"
    r"|all_to_all_single|barrier|broadcast|broadcast_object_list|gather|gather_object|monitored_barrier|new_group|reduce"
    r"|reduce_scatter|reduce_scatter_tensor|scatter|scatter_object_list)"
)
"""Collectives by the names that they have with their module's."""
_ALONE = re.compile(
    r"(?:[\w.]+\.)?(?:all_gather|all_gather_object|all_reduce|all_to_all|barrier|broadcast_object_list|init_device_mesh"
    r"|DistributedDataParallel|DDP|FullyShardedDataParallel|FSDP|fully_shard|distribute_tensor|distribute_module|new_group)"
)
"""Names that mean a collective wherever they come from."""
_OF_SOME = frozenset({"group", "process_group", "mesh", "device_mesh"})
"""The arguments that say which ranks take part."""


def functions_with_collectives(texts: Sequence[str]) -> set[str]:
    """Return the functions of cells that run a collective of all ranks, also by way of each other."""
    trees = [ast.parse(text) for text in texts]
    functions = [node for tree in trees for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)]
    found: set[str] = set()
    for _ in functions:
        found |= {each.name for each in functions if any(collectives_in(ast.Module(each.body, []), found))}
    return found


def collectives_in(tree: ast.AST, functions: set[str]) -> Iterator[tuple[int, str]]:
    """Yield the line and the name of each call of a collective of all ranks; definitions call nothing."""
    pending = list(ast.iter_child_nodes(tree))
    while pending:
        node = pending.pop(0)
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda):
            continue
        pending += ast.iter_child_nodes(node)
        if isinstance(node, ast.Call) and not any(each.arg in _OF_SOME for each in node.keywords):
            name = ast.unparse(node.func)
            if _OF_TORCH.fullmatch(name) or _ALONE.fullmatch(name) or name in functions:
                yield node.lineno, name.rpartition(".")[2]
