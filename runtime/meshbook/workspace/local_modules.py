"""Which modules lie beside the notebook: their sources, their versions, and in which order they import each other."""

from __future__ import annotations

import ast
import hashlib
import os
import platform
import sys
import sysconfig
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from meshbook.errors import UsageError
from meshbook.formatting import format_bytes
from meshbook.system.processes import boot_id

MOST_BYTES = 16 << 20
"""Of all sources that are sent at once: more is no folder of modules, but somebody's home."""


@dataclass(frozen=True)
class LocalModule:
    """One module, as it was when its file was read."""

    name: str
    path: str
    root: str
    """The folder from which it is imported by its name."""
    source: bytes
    version: str
    """Names this source; see `version_of`."""
    imports: frozenset[str]
    """What it may import, by name."""
    files: str
    """Whose files these are; see `file_system`."""

    @property
    def is_package(self) -> bool:
        """Whether it is the ``__init__`` of one."""
        return Path(self.path).name == "__init__.py"


@dataclass(frozen=True)
class FoundModules:
    """Modules, those that others import first."""

    modules: tuple[LocalModule, ...]
    broken: Mapping[str, str]
    """Modules that are left out, since they do not parse: where and why."""


def file_system() -> str:
    """Equal on two processes exactly when a path is the same file for both."""
    try:
        return f"{boot_id()}/{os.stat('/proc/self/ns/mnt').st_ino}"
    except OSError:  # no Linux: one machine is taken for one file system
        return platform.node()


def version_of(source: bytes) -> str:
    """Seven digits that name it."""
    return hashlib.sha256(source).hexdigest()[:7]


def find_modules(path: Path) -> FoundModules:
    """The modules at ``path``: a file, a package (a folder with ``__init__.py``), or a folder with some of both.

    Of a package all modules are taken, also where ``path`` is a part of it. Raises: UsageError.
    """
    path = Path(os.path.abspath(path))
    if not path.exists():
        raise UsageError(f"there is no {path}: name a module's file, a package, or a folder that has some")
    if not (path.is_file() or path.is_dir()):
        raise UsageError(f"{path} is neither a file nor a folder: name a module's file, a package, or a folder of some")
    files = sorted(_files(path))
    if not files:
        raise UsageError(f"{path} has no Python modules: name a .py file, a package, or a folder that has some")
    size = sum(file.stat().st_size for file, _ in files)
    if size > MOST_BYTES:
        raise UsageError(
            f"{path} has {len(files):,} modules, {format_bytes(size)} in all, and {format_bytes(MOST_BYTES)} are the "
            "most; name the file or the package that the ranks need"
        )
    found, broken, here = {}, {}, file_system()
    for file, root in files:
        source = file.read_bytes()
        name = _name(file, root)
        try:
            imports = frozenset(_imports(ast.parse(source), name, is_package=file.name == "__init__.py"))
        except (SyntaxError, ValueError) as error:  # ValueError: null bytes
            broken[name] = f"{file}, line {getattr(error, 'lineno', None) or 1}: {getattr(error, 'msg', error)}"
            continue
        found[name] = LocalModule(name, str(file), str(root), source, version_of(source), imports, here)
    return FoundModules(tuple(_in_order(found)), broken)


def find_module(name: str) -> FoundModules | None:
    """The module or package of this name, without dots, that this process would import, unless it was installed.

    Raises: UsageError if it is too large to be sent.
    """
    for entry in sys.path:
        for path in (Path(entry, name, "__init__.py"), Path(entry, f"{name}.py")):
            if path.is_file():
                return None if is_installed(path) else find_modules(path)
    return None


def is_installed(path: Path) -> bool:
    """Whether a file belongs to Python or to an installed package."""
    folders = {sysconfig.get_path(kind) for kind in ("stdlib", "platstdlib", "purelib", "platlib")}
    return any(path.is_relative_to(folder) for folder in folders)


def _files(path: Path) -> Iterator[tuple[Path, Path]]:
    """Files of modules, each with the folder that it is imported from."""
    top = path
    while (top.parent / "__init__.py").exists():
        top = top.parent
    if top.is_file():
        if _is_module(top):
            yield top, top.parent
    elif (top / "__init__.py").exists():
        yield from ((file, top.parent) for file in _of_package(top))
    else:
        for entry in top.iterdir():
            if entry.is_file() or (entry.name.isidentifier() and (entry / "__init__.py").exists()):
                yield from _files(entry)


def _of_package(folder: Path) -> Iterator[Path]:
    """All files of a package; a folder within it is part of it, with or without ``__init__.py``."""
    for entry in folder.iterdir():
        if entry.is_dir():
            if entry.name.isidentifier() and entry.name != "__pycache__":
                yield from _of_package(entry)
        elif _is_module(entry):
            yield entry


def _is_module(file: Path) -> bool:
    """A package's ``__main__`` is a program, and a rank has one of its own."""
    return file.suffix == ".py" and file.stem.isidentifier() and file.stem != "__main__"


def _name(file: Path, root: Path) -> str:
    parts = file.relative_to(root).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def _imports(tree: ast.Module, name: str, *, is_package: bool) -> Iterator[str]:
    """Every name that may be a module which this one imports, wherever in it."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            up = node.level - is_package
            base = name.split(".")[: -up or None] if node.level else []
            origin = ".".join([*base, *filter(None, [node.module])])
            yield origin
            yield from (f"{origin}.{alias.name}" for alias in node.names)


def _in_order(modules: Mapping[str, LocalModule]) -> Iterable[LocalModule]:
    """Those that others import come before these; among some that import each other, any order."""
    ordered: dict[str, LocalModule] = {}
    begun: set[str] = set()

    def add(name: str) -> None:
        if name in modules and name not in begun:
            begun.add(name)
            for needed in sorted(modules[name].imports):
                add(needed)
            ordered[name] = modules[name]

    for name in modules:
        add(name)
    return ordered.values()
