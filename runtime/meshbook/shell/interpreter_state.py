"""A program's changes of its interpreter, and the way back.

A process of torchrun ends with its program, so programs change what belongs to the whole process and leave it so: they
silence ``print``, lead ``sys.stdout`` into a file, choose the start method of `multiprocessing`, add handlers to the
root logger. On a rank the next program, and the next cell, would find all of that: a method that is set twice is an
error, a handler that is added twice prints each line twice.

What libraries keep for themselves is not touched. They stay imported, and would not set it again.
"""

from __future__ import annotations

import builtins
import contextlib
import gc
import logging
import multiprocessing
import os
import signal
import sys
import threading
import warnings
from collections.abc import Callable, Iterator
from concurrent.futures import Executor
from multiprocessing.process import BaseProcess
from pathlib import Path
from types import FunctionType, ModuleType
from typing import Any

from meshbook.source.location import USER, kind_of_file

Setting = tuple[Callable[[], Any], Callable[[Any], object]]
"""The functions that return and set a setting of the process."""

_HOOKS = ("argv", "stdin", "stdout", "stderr", "excepthook", "unraisablehook")
_SIGNALS = signal.valid_signals() - {signal.SIGINT, signal.SIGKILL, signal.SIGSTOP}
"""The signals whose handlers a program may set; SIGINT is the interrupt gate's."""
END_S = 5.0
"""The time for which a process that was told to end is waited for."""


@contextlib.contextmanager
def as_it_was(beside: str) -> Iterator[None]:
    """Put back at the end of the block what a program changes of its interpreter.

    beside: the folder whose modules are forgotten; empty: these, the environment, the process's folder, loggers and
    settings stay, since names that are kept build on them.
    """
    hooks, names = {name: getattr(sys, name) for name in _HOOKS}, dict(vars(builtins))
    path, known = list(sys.path), dict(sys.modules)
    handlers, (left_s, _) = {each: signal.getsignal(each) for each in _SIGNALS}, signal.getitimer(signal.ITIMER_REAL)
    try:
        with contextlib.ExitStack() as also:
            if beside:
                also.enter_context(_own_loggers())
                also.enter_context(_settings_as_they_were(beside, known))
            yield
    finally:
        for stream in (sys.stdout, sys.stderr):
            with contextlib.suppress(Exception):  # a program's own, which may be closed
                stream.flush()
        for name, value in hooks.items():
            setattr(sys, name, value)
        for name in vars(builtins).keys() - names.keys():
            delattr(builtins, name)
        vars(builtins).update(names)
        sys.path[:], sys.modules["__main__"] = path, known["__main__"]
        if not left_s:
            signal.setitimer(signal.ITIMER_REAL, 0)  # else it would find no handler, and end the process
        for number, handler in handlers.items():
            now = signal.getsignal(number)
            if number == signal.SIGCHLD and callable(now):
                continue  # torch's, which sets it once
            if handler is not None and now is not handler:  # so this is the main thread
                signal.signal(number, handler)


class Started:
    """The threads and processes that a program begins, which Python ends or waits for before it ends."""

    def __init__(self) -> None:
        """Remember those that are there already."""
        self._threads, self._children = set(threading.enumerate()), set(multiprocessing.active_children())
        self._pid = os.getpid()

    def wait(self) -> None:
        """Wait for threads and processes as Python does at its end; pools that are idle end."""
        threads = {each for each in set(threading.enumerate()) - self._threads if not each.daemon}
        if threads:
            for pool in [each for each in gc.get_objects() if issubclass(type(each), Executor)]:
                own = {*getattr(pool, "_threads", ()), getattr(pool, "_executor_manager_thread", None)}
                if own & threads:
                    pool.shutdown()  # its threads wait for work
        for thread in threads:
            thread.join()
        for child in self._left():
            if not child.daemon:
                child.join()

    def end(self) -> None:
        """End the remaining processes, as Python does with those that are daemons."""
        left = self._left()
        if not left or threading.current_thread() is not threading.main_thread():
            return
        handler = signal.signal(signal.SIGCHLD, signal.SIG_DFL)  # torch's takes a worker that is ended for a failure
        try:
            for child in left:
                child.terminate()
                child.join(END_S)
        finally:
            if handler is not None:
                signal.signal(signal.SIGCHLD, handler)

    def _left(self) -> set[BaseProcess]:
        is_forked = os.getpid() != self._pid  # the program's own fork: they are its parent's children
        return set() if is_forked else set(multiprocessing.active_children()) - self._children


def drop_values(names: dict[str, object]) -> None:
    """Drop the values of a program's global names, but for functions, classes and modules, one after the other.

    They are in one cycle with its functions. If they were collected together, queues would be closed before the
    DataLoader that tells its workers to end by them, and each worker would hold the rank for seconds.
    """
    kept = FunctionType | ModuleType | type
    for name in [name for name, value in list(names.items()) if name[:2] != "__" and not isinstance(value, kept)]:
        del names[name]


@contextlib.contextmanager
def _settings_as_they_were(beside: str, known: dict[str, ModuleType]) -> Iterator[None]:
    """Put back folder, environment, modules and settings; forget modules in ``beside`` that are not known."""
    folder, environment = os.getcwd(), dict(os.environ)
    settings = [(get, put, get()) for get, put in _settings()]
    try:
        with warnings.catch_warnings():
            yield
    finally:
        os.chdir(folder)
        for name in os.environ.keys() - environment.keys():
            del os.environ[name]
        os.environ.update(environment)
        for get, put, before in settings:
            if get() != before:
                put(before)
        sys.modules.update(known)
        for name in sys.modules.keys() - known.keys():
            file = getattr(sys.modules[name], "__file__", None) or ""
            if file.endswith(".py") and Path(file).is_relative_to(beside) and kind_of_file(file) == USER:
                del sys.modules[name]


def _settings() -> list[Setting]:
    settings: list[Setting] = [
        (gc.isenabled, lambda was_on: gc.enable() if was_on else gc.disable()),
        (sys.getrecursionlimit, sys.setrecursionlimit),
        (
            lambda: multiprocessing.get_start_method(allow_none=True),
            lambda method: multiprocessing.set_start_method(method, force=True),
        ),
    ]
    if (torch := sys.modules.get("torch")) is not None:
        settings += [
            (torch.is_grad_enabled, torch.set_grad_enabled),
            (torch.get_default_dtype, torch.set_default_dtype),
            (torch.get_default_device, lambda was: torch.set_default_device(None if was.type == "cpu" else was)),
            (torch.get_num_threads, torch.set_num_threads),
            (torch.get_deterministic_debug_mode, torch.set_deterministic_debug_mode),
            (torch.is_anomaly_enabled, torch.autograd.set_detect_anomaly),
        ]
    return settings


@contextlib.contextmanager
def _own_loggers() -> Iterator[None]:
    """Give a program loggers of its own, and put back the root logger; a library stays imported and keeps its own."""
    root = logging.root
    level, handlers, filters = root.level, root.handlers[:], root.filters[:]
    others = _take_own_loggers()
    try:
        yield
    finally:
        for logger in (root, *_take_own_loggers().values()):
            for handler in set(getattr(logger, "handlers", ())).difference(handlers):
                with contextlib.suppress(Exception):  # a program's own
                    handler.close()
        root.handlers[:], root.filters[:] = handlers, filters
        root.setLevel(level)
        root.manager.loggerDict.update(others)


def _take_own_loggers() -> dict[str, logging.Logger | logging.PlaceHolder]:
    """Remove the loggers that are named after no imported module, or after the main one; return them."""
    known = logging.root.manager.loggerDict
    tops = {name: name.partition(".")[0] for name in known}
    return {name: known.pop(name) for name, top in tops.items() if top == "__main__" or top not in sys.modules}
