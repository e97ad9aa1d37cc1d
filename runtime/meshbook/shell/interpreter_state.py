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
from typing import Any, NamedTuple

from meshbook.source.location import USER, kind_of_file

Setting = tuple[Callable[[], Any], Callable[[Any], object]]
"""The functions that return and set a setting of the process."""

_SETTINGS: tuple[Setting, ...] = (
    (gc.isenabled, lambda was_on: gc.enable() if was_on else gc.disable()),
    (sys.getrecursionlimit, sys.setrecursionlimit),
    (
        lambda: multiprocessing.get_start_method(allow_none=True),
        lambda method: multiprocessing.set_start_method(method, force=True),
    ),
)
_TORCHS = (
    ("is_grad_enabled", "set_grad_enabled"),
    ("get_default_dtype", "set_default_dtype"),
    ("get_num_threads", "set_num_threads"),
    ("get_deterministic_debug_mode", "set_deterministic_debug_mode"),
)
"""The names of torch's functions that return and set a setting."""
_HOOKS = ("argv", "stdin", "stdout", "stderr", "excepthook", "unraisablehook")
_SIGNALS = signal.valid_signals() - {signal.SIGINT, signal.SIGKILL, signal.SIGSTOP}
"""The signals whose handlers a program may set; SIGINT is the interrupt gate's."""
END_S = 5.0
"""The time for which a process that was told to end is waited for."""
_TIMERS = (signal.ITIMER_REAL, signal.ITIMER_VIRTUAL, signal.ITIMER_PROF)


@contextlib.contextmanager
def as_it_was(beside: str) -> Iterator[None]:
    """Put back at the end of the block what a program changes of its interpreter.

    beside: the folder whose modules are forgotten; empty: these, the environment, the process's folder, loggers and
    settings stay, since names that are kept build on them.
    """
    hooks, names = {name: getattr(sys, name) for name in _HOOKS}, dict(vars(builtins))
    path, known = list(sys.path), dict(sys.modules)
    handlers, timers = {each: signal.getsignal(each) for each in _SIGNALS}, [signal.getitimer(each) for each in _TIMERS]
    try:
        with _settings_as_they_were(beside, known) if beside else contextlib.nullcontext():
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
        for timer, before in zip(_TIMERS, timers, strict=True):
            if not before[0] and signal.getitimer(timer)[0]:
                signal.setitimer(timer, 0)  # else it would find no handler, and end the process
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
    """Put back folder, environment, modules, settings and loggers; forget modules in ``beside`` that are not known."""
    folder, environment, loggers, hook = os.getcwd(), dict(os.environ), _loggers(), threading.excepthook
    settings = [(get, put, get()) for get, put in (*_SETTINGS, *_torchs_settings())]
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
        threading.excepthook = hook
        sys.modules.update(known)
        for name in sys.modules.keys() - known.keys():
            file = getattr(sys.modules[name], "__file__", None) or ""
            if file.endswith(".py") and Path(file).is_relative_to(beside) and kind_of_file(file) == USER:
                del sys.modules[name]
        _put_back(loggers)


def _torchs_settings() -> list[Setting]:
    if (torch := sys.modules.get("torch")) is None:
        return []
    device = torch.get_default_device, lambda was: torch.set_default_device(None if was.type == "cpu" else was)
    anomalies = torch.is_anomaly_enabled, torch.autograd.set_detect_anomaly
    return [(getattr(torch, get), getattr(torch, put)) for get, put in _TORCHS] + [device, anomalies]


class _Logger(NamedTuple):
    level: int
    handlers: tuple[logging.Handler, ...]
    filters: tuple[Any, ...]
    propagate: bool
    disabled: bool


_FRESH = _Logger(logging.NOTSET, (), (), True, False)


def _loggers() -> dict[str, _Logger]:
    """Return the state of each logger, by its name."""
    return {
        each.name: _Logger(each.level, tuple(each.handlers), tuple(each.filters), each.propagate, each.disabled)
        for each in _all_loggers()
    }


def _all_loggers() -> list[logging.Logger]:
    known = list(logging.root.manager.loggerDict.values())
    return [logging.root, *(each for each in known if isinstance(each, logging.Logger))]


def _put_back(before: dict[str, _Logger]) -> None:
    """Put back the root logger and those of the program; a library that stays imported keeps its own."""
    for logger in _all_loggers():
        top = logger.name.partition(".")[0]
        if logger is not logging.root and top != "__main__" and top in sys.modules:
            continue
        was = before.get(logger.name, _FRESH)
        for handler in set(logger.handlers).difference(was.handlers):
            with contextlib.suppress(Exception):  # a program's own
                handler.close()
        logger.handlers[:], logger.filters[:] = was.handlers, was.filters
        logger.setLevel(was.level)
        logger.propagate, logger.disabled = was.propagate, was.disabled
