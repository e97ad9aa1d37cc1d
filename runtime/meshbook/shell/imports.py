"""What may follow in an import statement, found without importing anything.

IPython's own completer imports the module to list its names; on a rank that would be user code on a side thread.
Modules that are loaded are looked into, others are read.
"""

from __future__ import annotations

import ast
import importlib.machinery
import importlib.util
import pkgutil
import re
import sys
import time
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import NamedTuple

from meshbook.system.descriptors import above_standard

SOURCE_MAX_BYTES = 1 << 20
TOP_LEVEL_FRESH_S = 30.0
"""How long the list of all modules may be used: the folders are read again then."""

_FROM = re.compile(r"\s*from\s+([\w.]+)\s+import\s+\(?(?:[\w\s,]*[,\s(])?(\w*)$")
_MODULE = re.compile(r"\s*(?:from\s+|import\s+(?:[\w.\s]+,)*\s*)(?:([\w.]+)\.)?(\w*)$")
_BETWEEN = re.compile(r"\s*from\s+[\w.]+\s+(i?m?p?o?r?)$")

_top_level: tuple[float, tuple[str, ...], list[str]] = (0.0, (), [])


class ImportNames(NamedTuple):
    """What may stand in place of the last ``len(typed)`` characters."""

    typed: str
    names: list[str]


def import_names(line: str) -> ImportNames | None:
    """Complete the end of ``line``; None if it is no import statement."""
    if found := _FROM.fullmatch(line):
        return _starting_with(found[2], names_in(found[1]))
    if found := _BETWEEN.fullmatch(line):
        return _starting_with(found[1], ["import"])
    if found := _MODULE.fullmatch(line):
        return _starting_with(found[2], submodules(found[1]) if found[1] else top_level())
    return None


def top_level() -> list[str]:
    """Every module that could be imported, or has been."""
    global _top_level
    read_at, path, names = _top_level
    if path != tuple(sys.path) or time.monotonic() - read_at > TOP_LEVEL_FRESH_S:
        found = {module.name for module in pkgutil.iter_modules()} | set(sys.builtin_module_names)
        found |= {name for name in tuple(sys.modules) if "." not in name}
        names = sorted(found)
        _top_level = time.monotonic(), tuple(sys.path), names
    return names


def submodules(package: str) -> list[str]:
    """Modules directly inside a package."""
    return sorted({module.name for module in pkgutil.iter_modules(_folders(package))})


def names_in(module: str) -> list[str]:
    """What ``from module import`` finds."""
    loaded = sys.modules.get(module)
    if loaded is not None:
        return sorted({*dir(loaded), *submodules(module)})
    spec = _find(module)
    names = _defined_in(spec.origin) if spec is not None and spec.origin else []
    return sorted({*names, *submodules(module)})


def _starting_with(typed: str, names: Iterable[str]) -> ImportNames:
    hidden = not typed.startswith("_")
    return ImportNames(typed, [n for n in names if n.startswith(typed) and not (hidden and n.startswith("_"))])


def _folders(package: str) -> Sequence[str]:
    loaded = sys.modules.get(package)
    if loaded is not None:
        return list(getattr(loaded, "__path__", ()))
    spec = _find(package)
    return list(spec.submodule_search_locations or ()) if spec is not None else ()


def _find(module: str) -> importlib.machinery.ModuleSpec | None:
    """The spec, by walking down from the top: `importlib.util.find_spec` would import the parents."""
    folders: Sequence[str] | None = None
    spec = None
    parts = module.split(".")
    for end in range(1, len(parts) + 1):
        spec = importlib.machinery.PathFinder.find_spec(".".join(parts[:end]), folders)
        if spec is None:
            return None
        folders = list(spec.submodule_search_locations or ())
    return spec


def _defined_in(path: str) -> list[str]:
    """The names that a source file binds at its top level."""
    source = Path(path)
    if source.suffix != ".py" or source.stat().st_size > SOURCE_MAX_BYTES:
        return []
    names: list[str] = []
    with above_standard():
        text = source.read_bytes()
    for node in ast.parse(text).body:
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
            names.append(node.name)
        elif isinstance(node, (ast.Import, ast.ImportFrom)):
            names += [(alias.asname or alias.name).partition(".")[0] for alias in node.names if alias.name != "*"]
        elif isinstance(node, (ast.Assign, ast.AnnAssign)):
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            names += [name.id for target in targets for name in ast.walk(target) if isinstance(name, ast.Name)]
    return names
