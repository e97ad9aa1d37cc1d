"""The modules beside the notebook: found on its machine, sent to the ranks, and imported or reloaded there.

A rank that sees the very files imports them as they are by then, as without us; our reload takes the sent text, so that
all ranks get the same. Where IPython's autoreload is on, objects that it looks after are brought up to date as by it.
"""

from __future__ import annotations

import ast
import hashlib
import importlib
import importlib.abc
import importlib.util
import os
import sys
import sysconfig
import threading
import time
import traceback
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import FunctionType, ModuleType
from typing import Any, NamedTuple

from meshbook.concurrency import forks
from meshbook.errors import UsageError
from meshbook.formatting import format_bytes
from meshbook.system.processes import boot_id

MOST_BYTES = 16 << 20
"""The limit for all sources that are sent at once: a larger folder is a home, not one of modules."""


script_folders: set[str] = set()
"""The folders of the programs that were run on ranks from here; ranks import the modules beside them."""


@dataclass(frozen=True)
class LocalModule:
    """A module, as it was when its file was read."""

    name: str
    path: str
    root: str
    """The folder from which it is imported by its name."""
    source: bytes
    version: str
    """Names this source; see `version_of`."""
    imports: frozenset[str]
    """The names of the modules that it may import."""
    files: str
    """The file system of its path; see `file_system`."""

    @property
    def is_package(self) -> bool:
        """Whether it is the ``__init__`` of one."""
        return Path(self.path).name == "__init__.py"


@dataclass(frozen=True)
class FoundModules:
    """Modules in an order in which imported modules come first."""

    modules: tuple[LocalModule, ...]
    broken: Mapping[str, str]
    """Modules that are left out, since they do not parse: where and why."""


def file_system() -> str:
    """Return a name that is equal on two processes exactly when a path is the same file for both."""
    return f"{boot_id()}/{os.stat('/proc/self/ns/mnt').st_ino}"


def version_of(source: bytes) -> str:
    """Return seven digits that name a source."""
    return hashlib.sha256(source).hexdigest()[:7]


def find_modules(path: Path) -> FoundModules:
    """Return the modules at ``path``: a file, a package (a folder with ``__init__.py``), or a folder with some of both.

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
    for entry in (*sys.path, *sorted(script_folders)):
        for path in (Path(entry, name, "__init__.py"), Path(entry, f"{name}.py")):
            if path.is_file():
                return None if is_installed(path) else find_modules(path)
    return None


def is_installed(path: Path) -> bool:
    """Whether a file belongs to Python or to an installed package."""
    folders = {sysconfig.get_path(kind) for kind in ("stdlib", "platstdlib", "purelib", "platlib")}
    return any(path.is_relative_to(folder) for folder in folders)


def _files(path: Path) -> Iterator[tuple[Path, Path]]:
    """Give the files of modules, each with the folder that it is imported from."""
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
    """Give the files of a package; a folder within is part of it, with or without ``__init__.py``."""
    for entry in folder.iterdir():
        if entry.is_dir():
            if entry.name.isidentifier() and entry.name != "__pycache__":
                yield from _of_package(entry)
        elif _is_module(entry):
            yield entry


def _is_module(file: Path) -> bool:
    """Whether a file is a module; a package's ``__main__`` is a program, and a rank has one of its own."""
    return file.suffix == ".py" and file.stem.isidentifier() and file.stem != "__main__"


def _name(file: Path, root: Path) -> str:
    parts = file.relative_to(root).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def _imports(tree: ast.Module, name: str, *, is_package: bool) -> Iterator[str]:
    """Give each name that may be a module which this one imports, anywhere in it."""
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
    """Put modules before their importers; modules that import each other come in any order."""
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


# ---- on a rank -------------------------------------------------------------------------------------------------------

MISSING_S = 2.0
"""The time for which a module that the notebook does not have is not asked for again."""

SILENT_S = 60.0
"""The time for which no question is sent after one that was not answered."""

SENT, SAME, RELOADED, FAILED, OTHER = "sent", "same", "reloaded", "failed", "other"


class Synced(NamedTuple):
    """The outcome for one module in one process."""

    state: str
    """sent: not imported yet; same: this version is in use; reloaded; failed: it keeps the version before; other: a
    module of that name that is not ours is in use."""
    problem: str = ""


_sent: dict[str, LocalModule] = {}
_in_use: dict[str, str] = {}
"""Versions of modules that were imported since they were first sent; nobody knows those of others."""


class _SentLoader(importlib.abc.SourceLoader):
    def __init__(self, module: LocalModule) -> None:
        self._module = module

    def get_filename(self, fullname: str) -> str:
        return self._module.path

    def get_data(self, path: str | bytes) -> bytes:
        if path != self._module.path:
            raise OSError(f"{path!r} was not sent: modules come without the files beside them")
        return self._module.source

    def exec_module(self, module: ModuleType) -> None:
        _in_use.pop(self._module.name, None)
        super().exec_module(module)
        _in_use[self._module.name] = self._module.version


class _SentFinder(importlib.abc.MetaPathFinder):
    def __init__(self) -> None:
        self._reloading = ""
        """The module that is being reloaded as it was sent; others who reload one take its file, where it lies here."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        module = _sent.get(fullname)
        if module is None:
            is_folder = any(name.startswith(f"{fullname}.") for name in _sent)  # of a package, without __init__.py
            return ModuleSpec(fullname, None, is_package=True) if is_folder else None
        if fullname != self._reloading and _lies_here(module):
            source = Path(module.path).read_bytes()
            module = replace(module, source=source, version=version_of(source))
        return importlib.util.spec_from_loader(fullname, _SentLoader(module))

    def reload(self, module: ModuleType) -> None:
        """Reload a module as it was sent. Raises: the errors of its code."""
        self._reloading = module.__name__
        try:
            if (reloader := _autoreload()) is None:
                importlib.reload(module)
            else:
                superreload = sys.modules["IPython.extensions.autoreload"].superreload
                superreload(module, importlib.reload, reloader.old_objects)
        finally:
            self._reloading = ""


class _AskingFinder(importlib.abc.MetaPathFinder):
    """The last of the finders, which asks the notebook for modules that are nowhere here."""

    def __init__(self, ask: Callable[[str], FoundModules | None]) -> None:
        self._ask = ask
        self._missing: dict[str, float] = {}
        """The times when the notebook had no such module; libraries look for many that they can do without."""
        self._silent = -SILENT_S
        """The time when the notebook last did not answer."""
        self._asking = threading.local()
        self._generation = forks.generation

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if "." in fullname or self._generation != forks.generation:
            return None  # a package comes whole; a child that user code has forked cannot ask
        now = time.monotonic()
        if now < self._missing.get(fullname, -MISSING_S) + MISSING_S or now < self._silent + SILENT_S:
            return None
        if getattr(self._asking, "now", False):
            return None  # asking itself imports something that is not there
        self._asking.now = True
        try:
            found = self._ask(fullname)
        except ModuleNotFoundError:
            self._silent = time.monotonic()
            raise
        finally:
            self._asking.now = False
        if found is None:
            self._missing[fullname] = time.monotonic()
            return None
        for name, problem in found.broken.items():
            raise ImportError(f"{name}, which lies beside the notebook, does not parse: {problem}", name=fullname)
        _install()
        _sent.update((module.name, module) for module in found.modules)
        return _finder.find_spec(fullname, path)


_finder = _SentFinder()


def ask_for_missing(ask: Callable[[str], FoundModules | None]) -> None:
    """Ask for modules that this process does not find from now on.

    ask: gives the module of a name, None where there is none; raises ModuleNotFoundError if nobody answers.
    """
    sys.meta_path.append(_AskingFinder(ask))


def _install() -> None:
    if _finder not in sys.meta_path:
        sys.meta_path.insert(0, _finder)


def take_modules(modules: Sequence[LocalModule], namespace: dict[str, object] | None = None) -> dict[str, Synced]:
    """Make modules importable here; reload those in use that are of another version, or import such.

    modules: in the order of `FoundModules`. namespace: where names bound to functions and classes of reloaded modules
    get the new ones; by default ``__main__``. Returns: the outcome for each.
    """
    _install()
    if namespace is None:
        namespace = vars(sys.modules["__main__"])
    _sent.update((module.name, module) for module in modules)
    importlib.invalidate_caches()
    changed: set[str] = set()
    taken = {}
    for module in modules:
        taken[module.name] = result = _take(module, namespace, changed)
        if result.state == RELOADED:
            changed.add(module.name)
    return taken


def _take(module: LocalModule, namespace: dict[str, object], changed: set[str]) -> Synced:
    loaded = sys.modules.get(module.name)
    if loaded is None:
        return Synced(SENT)
    if _is_of_library(loaded):
        del _sent[module.name]
        return Synced(OTHER, f"the name is that of {getattr(loaded, '__file__', None) or 'a built-in module'}")
    if _in_use.get(module.name) == module.version and not module.imports & changed:
        return Synced(SAME)
    before = dict(vars(loaded))
    version = _in_use.get(module.name)
    try:
        _finder.reload(loaded)
    except BaseException as error:
        vars(loaded).clear()
        vars(loaded).update(before)
        if version is not None:
            _in_use[module.name] = version
        if not isinstance(error, Exception):
            raise
        return Synced(FAILED, _describe(error, module.path))
    _rebind(namespace, before, loaded)
    return Synced(RELOADED)


def _autoreload() -> Any:
    """Return IPython's reloader, with the objects that it keeps up to date; None where it is off."""
    if "IPython.extensions.autoreload" not in sys.modules or (shell := sys.modules["IPython"].get_ipython()) is None:
        return None
    reloader = getattr(shell.magics_manager.registry.get("AutoreloadMagics"), "_reloader", None)
    return reloader if getattr(reloader, "enabled", False) else None


def _lies_here(module: LocalModule) -> bool:
    """Whether Python finds the notebook's own file by this name."""
    return (
        module.files == file_system()
        and os.path.isfile(module.path)
        and any(os.path.abspath(entry) == module.root for entry in sys.path)
    )


def _is_of_library(module: ModuleType) -> bool:
    """Whether it belongs to Python or was installed: a file beside the notebook that has its name is another one."""
    file = getattr(module, "__file__", None)
    if file is None:
        return not hasattr(module, "__path__")
    return is_installed(Path(file))


def _rebind(namespace: dict[str, object], before: dict[str, object], module: ModuleType) -> None:
    """Bind the new ``f`` after ``from module import f``; objects keep their old classes.

    A function or class that says that it is the module's counts too: after a reload by others the module has another.
    """
    own = {id(value): name for name, value in before.items() if getattr(value, "__module__", None) == module.__name__}
    for bound, value in list(namespace.items()):
        name = own.get(id(value))
        if name is not None and value is not before[name]:
            continue
        if name is None and isinstance(value, (FunctionType, type)) and value.__module__ == module.__name__:
            name = value.__qualname__
        if name is not None and name in vars(module):
            namespace[bound] = vars(module)[name]


def _describe(error: Exception, path: str) -> str:
    """Describe an error in a line, with the last line of the module that it went through."""
    lines = [frame.lineno for frame in traceback.extract_tb(error.__traceback__) if frame.filename == path]
    text = traceback.format_exception_only(error)[-1].strip()
    return f"{Path(path).name}, line {lines[-1]}: {text}" if lines else text
