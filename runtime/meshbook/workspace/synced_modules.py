"""In a process that modules were sent to: they are imported from memory, and those in use are reloaded.

A process that sees the very files imports what they say by then, as without us; our reload takes what was sent, so that
all ranks get the same. Where IPython's autoreload is on, objects that it looks after are brought up to date as by it.
"""

from __future__ import annotations

import importlib
import importlib.abc
import importlib.util
import os
import sys
import threading
import time
import traceback
from collections.abc import Callable, Sequence
from dataclasses import replace
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import FunctionType, ModuleType
from typing import Any, NamedTuple

from meshbook.concurrency import forks
from meshbook.workspace.local_modules import FoundModules, LocalModule, file_system, is_installed, version_of

MISSING_S = 2.0
"""So long a module that the notebook does not have is not asked for again."""

SILENT_S = 60.0
"""So long nothing is asked for after a question that nobody answered."""

SENT, SAME, RELOADED, FAILED, OTHER = "sent", "same", "reloaded", "failed", "other"


class Synced(NamedTuple):
    """What became of one module in one process."""

    state: str
    """sent: not imported yet; same: this version is in use; reloaded; failed: it keeps the version before; other: a
    module of that name that is not ours is in use."""
    problem: str = ""


_sent: dict[str, LocalModule] = {}
_reloading = ""
"""The module that is being reloaded as it was sent; others who reload one take its file, where that lies here."""
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
    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        module = _sent.get(fullname)
        if module is None:
            is_folder = any(name.startswith(f"{fullname}.") for name in _sent)  # of a package, without __init__.py
            return ModuleSpec(fullname, None, is_package=True) if is_folder else None
        if fullname != _reloading and _lies_here(module):
            source = Path(module.path).read_bytes()
            module = replace(module, source=source, version=version_of(source))
        return importlib.util.spec_from_loader(fullname, _SentLoader(module))


class _AskingFinder(importlib.abc.MetaPathFinder):
    """Asks the notebook for modules that are nowhere here; the last of the finders."""

    def __init__(self, ask: Callable[[str], FoundModules | None]) -> None:
        self._ask = ask
        self._missing: dict[str, float] = {}
        """When it was told that the notebook has no such module; libraries look for many that they can do without."""
        self._silent = -SILENT_S
        """When the notebook has not answered."""
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
    """From now on modules that this process does not find are asked for.

    ask: gives the module of a name, None where there is none; raises ModuleNotFoundError if nobody answers.
    """
    sys.meta_path.append(_AskingFinder(ask))


def _install() -> None:
    if _finder not in sys.meta_path:
        sys.meta_path.insert(0, _finder)


def take_modules(modules: Sequence[LocalModule], namespace: dict[str, object] | None = None) -> dict[str, Synced]:
    """Have these modules importable here; reload those in use that are of another version, or import such.

    modules: in the order of `FoundModules`. namespace: where names bound to functions and classes of reloaded modules
    get the new ones; by default ``__main__``. Returns: what became of each.
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
        _reload(loaded)
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


def _reload(module: ModuleType) -> None:
    global _reloading
    _reloading = module.__name__
    try:
        if (reloader := _autoreload()) is None:
            importlib.reload(module)
        else:
            superreload = sys.modules["IPython.extensions.autoreload"].superreload
            superreload(module, importlib.reload, reloader.old_objects)
    finally:
        _reloading = ""


def _autoreload() -> Any:
    """IPython's, with the objects that it keeps up to date; None where it is off."""
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
    """Bind the new ``f`` where ``from module import f`` was said; objects keep their old classes.

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
    """The error in a line, with the last line of the module that it went through."""
    lines = [frame.lineno for frame in traceback.extract_tb(error.__traceback__) if frame.filename == path]
    text = traceback.format_exception_only(error)[-1].strip()
    return f"{Path(path).name}, line {lines[-1]}: {text}" if lines else text
