"""A program as the main program of every rank, as torchrun starts it.

    train.py --lr 0.1              ``__main__`` is a module of its own, sys.argv has the arguments, sys.path the folder
    -m package.train --lr 0.1      the same for a module

The notebook's end reads the file, so that ranks on machines without it run it too, and a syntax error is found before
anything is sent. The rank's process lives on, so what a program changes of its interpreter is put back when it has
ended (`meshbook.shell.interpreter_state`). Modules that lie beside the program are forgotten, so that the next run
imports them as they are by then.
"""

from __future__ import annotations

import contextlib
import importlib.util
import os
import shutil
import sys
import tempfile
from collections.abc import Callable, Sequence
from importlib.abc import InspectLoader
from pathlib import Path
from types import CodeType, ModuleType
from typing import NamedTuple

from meshbook.errors import ScriptExit, UsageError
from meshbook.formatting import did_you_mean
from meshbook.shell.interpreter_state import Started, as_it_was, drop_values
from meshbook.source.location import Program, add_script
from meshbook.workspace.modules import script_folders

EXAMPLE = "train.py --lr 0.1, or -m package.train --lr 0.1"


class Script(NamedTuple):
    """A program to run, as the notebook has read it."""

    name: str
    """The file as it was typed, which is ``sys.argv[0]``, or the name of the module."""
    arguments: tuple[str, ...]
    path: str = ""
    """The file on the notebook's machine; empty for a module."""
    source: bytes = b""
    keep: bool = False
    """Whether its global names become names of the rank."""
    folder: str = ""
    """The notebook's folder, in which the program begins on machines that have it."""


def read_script(words: Sequence[str], *, keep: bool = False) -> Script:
    """Return the program that a line names: ``train.py ARGS``, or ``-m MODULE ARGS``.

    keep: as of `Script`. Raises: UsageError for a file that is not there or is none; SyntaxError for one that Python
    cannot read.
    """
    if not words or (words[0] == "-m" and len(words) < 2):
        raise UsageError(f"name the script to run: {EXAMPLE}")
    if words[0] == "-m":
        script_folders.add(os.getcwd())
        return Script(words[1], tuple(words[2:]), keep=keep, folder=os.getcwd())
    name, path = words[0], Path(words[0]).expanduser().absolute()
    if path.is_dir():
        raise UsageError(f"{name} is a folder; name the file to run, or a module: {EXAMPLE}")
    try:
        source = path.read_bytes()
    except FileNotFoundError:
        beside = [each.name for each in path.parent.glob("*.py")] if path.parent.is_dir() else []
        raise UsageError(f"there is no {name} in {path.parent}.{did_you_mean(path.name, beside)}") from None
    except OSError as error:
        raise UsageError(f"{name} cannot be read: {error.strerror}") from None
    try:
        compile(source, str(path), "exec", dont_inherit=True)
    except ValueError as error:  # null bytes
        raise UsageError(f"{name} is no Python program: {error}") from None
    script_folders.add(str(path.parent))
    return Script(name, tuple(words[1:]), str(path), source, keep, os.getcwd())


def run_script(script: Script, names: dict[str, object], enter: Callable[[dict[str, object]], None]) -> None:
    """Run the program as the main program of this process, to its end.

    names: gets its global names where it is to keep them, also those of one that failed.
    enter: is given the global names of the program before it begins.
    Raises: the errors of the program; ScriptExit where it ended with an exit code other than 0.
    """
    main = Program("__main__")
    with contextlib.ExitStack() as after:
        folder = str(Path(script.path).parent) if script.path else script.folder or os.getcwd()
        after.enter_context(as_it_was("" if script.keep else folder))
        if os.path.isdir(script.folder):
            os.chdir(script.folder)
        sys.path.insert(0, folder)
        code = _load(script, main, after)
        started = Started()
        sys.argv = [main.__file__ if not script.path else script.name, *script.arguments]  # type: ignore[list-item]
        sys.modules["__main__"] = main
        enter(vars(main))
        try:
            _execute(script, code, vars(main))
            started.wait()
        finally:
            if script.keep:
                names.update({name: value for name, value in vars(main).items() if not name.startswith("__")})
        if not script.keep:
            drop_values(vars(main))
            started.end()


def _execute(script: Script, code: CodeType, names: dict[str, object]) -> None:
    try:
        exec(code, names)
    except SystemExit as end:
        if end.code not in (None, 0):
            raise ScriptExit(script.name, end.code).with_traceback(end.__traceback__) from None


def _load(script: Script, main: ModuleType, after: contextlib.ExitStack) -> CodeType:
    """Return the code of the program; its main module gets the names that Python gives it.

    Raises: UsageError for a module that is nowhere; the errors of its package.
    """
    if not script.path:
        return _load_module(script.name, main)
    path = Path(script.path)
    if not path.is_file() or path.read_bytes() != script.source:  # on another machine; its own processes look for it
        folder = tempfile.mkdtemp(prefix="meshbook-script-")
        after.callback(shutil.rmtree, folder, ignore_errors=True)
        path = Path(folder, path.name)
        path.write_bytes(script.source)
    main.__file__ = str(path)
    vars(main).update(__builtins__=__builtins__, __cached__=None)
    add_script(str(path), script.source, path.name)
    return compile(script.source, str(path), "exec", dont_inherit=True)


def _load_module(name: str, main: ModuleType) -> CodeType:
    try:
        spec = importlib.util.find_spec(name)
        if spec is not None and spec.submodule_search_locations is not None:
            spec = importlib.util.find_spec(f"{name}.__main__")
    except ModuleNotFoundError as error:
        if error.name is None or not name.startswith(error.name):
            raise
        spec = None
    loader = spec.loader if spec is not None else None
    code = loader.get_code(spec.name) if spec is not None and isinstance(loader, InspectLoader) else None
    if spec is None or code is None:
        raise UsageError(f"there is no module {name} that can be run; ranks look for it in {os.getcwd()} and sys.path")
    names = {"__spec__": spec, "__package__": spec.parent, "__loader__": loader, "__file__": spec.origin}
    vars(main).update(names, __builtins__=__builtins__)
    return code
