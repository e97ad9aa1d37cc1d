"""What a test module leaves behind fails that module: processes, threads, file descriptors, memory files.

What hangs is ended, with every stack shown.

Anything that outlives a module on purpose is a session fixture: those that a module asks for are made before its
first snapshot. Processes that have lost their parent (a killed kernel's agents, say) are not among our children any
more; a test hands them to ``watch``, and they are held to the same rule.
"""

from __future__ import annotations

import collections
import faulthandler
import gc
import os
import re
import signal
import socket
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
import pytest
import pytest_timeout

from meshbook.launchers.agent_start import AGENT, LASTING
from meshbook.launchers.templates import HOST_TEMPLATE, exec_with

sys.modules["rfc3987_syntax"] = None  # type: ignore[assignment]
"""jsonschema asks for it as it is imported, and it builds a grammar for three seconds; no test checks addresses."""

os.environ.setdefault("MESHBOOK_LEASE_S", "5")
"""Agents whose controller a test kills end soon; tests of what outlives a controller say how long."""

signal.signal(signal.SIGINT, signal.default_int_handler)
"""A shell that starts us in the background has it ignored, and tests that press interrupt would wait for ever."""

PATIENCE_S = 10.0
"""How long a module's leftovers may take to vanish: longer than an agent takes to notice that it is alone."""

LASTING_THREADS = re.compile(r"IPythonHistorySavingThread|pydevd|_TaskRunner")
"""Threads of libraries that live as long as the process, whichever test starts them."""

TIMEOUT = pytest.StashKey[pytest_timeout.Settings]()
STDERR = pytest.StashKey[int]()
GRACE_S = 60.0
"""After a phase of a test should have failed by its timeout, until this process is given up."""


def pytest_configure(config: pytest.Config) -> None:
    config.stash[STDERR] = os.dup(2)  # which is captured later


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark kinds of a parametrized test: slow but for those of ``quick``, nightly but for those of ``some`` as well.

    Files with tests that may take long begin first, so that none of them is left to run alone at the end.
    """
    longest_s: collections.Counter[Path] = collections.Counter()
    for item in items:
        if (limit := item.get_closest_marker("timeout")) is not None:
            longest_s[item.path] = max(longest_s[item.path], limit.args[0])
    items.sort(key=lambda item: -longest_s[item.path])
    for item in items:
        named: tuple[object, ...] = ()
        for names, others in (("quick", "slow"), ("some", "nightly")):
            if (mark := item.get_closest_marker(names)) is not None and isinstance(item, pytest.Function):
                named += mark.args
                if item.callspec.id not in named:
                    item.add_marker(others)


def pytest_collection_finish() -> None:
    """Let no garbage collection look at what was imported, PyTorch and its like: that takes 0.25 s each time."""
    gc.collect()
    gc.freeze()


@pytest.hookimpl(tryfirst=True)
def pytest_timeout_set_timer(item: pytest.Item, settings: pytest_timeout.Settings) -> None:
    item.stash[TIMEOUT] = settings


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_runtest_setup(item: pytest.Item) -> Iterator[None]:
    """Bound this phase and the next ones, each anew.

    pytest-timeout forgets a test that has failed: neither its teardown nor its reruns have a limit, and fixtures of the
    module may be in that teardown. And its alarm is a Python exception, which a wait in C or an ``except`` can swallow;
    then the worker is given up, and xdist goes on with another.
    """
    if (settings := item.stash.get(TIMEOUT, None)) is None:
        return (yield)
    item.config.hook.pytest_timeout_set_timer(item=item, settings=settings)
    faulthandler.dump_traceback_later(settings.timeout + GRACE_S, file=item.config.stash[STDERR], exit=True)
    try:
        return (yield)
    finally:
        faulthandler.cancel_dump_traceback_later()
        item.config.hook.pytest_timeout_cancel_timer(item=item)


pytest_runtest_call = pytest_runtest_teardown = pytest_runtest_setup


@pytest.hookimpl(tryfirst=True)
def pytest_sessionfinish(session: pytest.Session) -> None:
    """Bound what is left of a process that has run tests: its plugins, its threads and the interpreter's exit."""
    if session.items:
        faulthandler.dump_traceback_later(2 * GRACE_S, file=session.config.stash[STDERR], exit=True)


@pytest.hookimpl(trylast=True)
def pytest_unconfigure(config: pytest.Config) -> None:
    """A worker of xdist has told all and waits for the others, for minutes maybe; then xdist ends it."""
    if hasattr(config, "workerinput"):
        faulthandler.cancel_dump_traceback_later()


@dataclass(frozen=True)
class Held:
    """What this process holds at one moment."""

    processes: frozenset[psutil.Process]
    threads: frozenset[threading.Thread]
    descriptors: collections.Counter[str]
    """How many are open of each kind; kinds, because a reconnected socket is another socket."""

    @classmethod
    def now(cls, watched: Iterable[psutil.Process] = ()) -> Held:
        gc.collect()
        living = [process for process in watched if process.is_running()]
        return cls(
            processes=frozenset([*psutil.Process().children(recursive=True), *living]),
            threads=frozenset(thread for thread in threading.enumerate() if not LASTING_THREADS.search(repr(thread))),
            descriptors=collections.Counter(_kinds_of_descriptors()),
        )

    def beyond(self, before: Held) -> list[str]:
        """One line for each thing that ``before`` did not have."""
        lines = [f"process {_describe(process)}" for process in self.processes - before.processes]
        lines += [f"thread {thread.name}" for thread in self.threads - before.threads]
        lines += [f"{count} x {kind}" for kind, count in (self.descriptors - before.descriptors).items()]
        return sorted(lines)


def _describe(process: psutil.Process) -> str:
    try:
        return f"{process.pid} ({process.status()}): {' '.join(process.cmdline())[:120]}"
    except psutil.NoSuchProcess:
        return f"{process.pid} (just ended)"


def _kinds_of_descriptors() -> Iterator[str]:
    """The open descriptors and the mapped memory files, named without their numbers."""
    for entry in os.listdir("/proc/self/fd"):
        try:
            target = os.readlink(f"/proc/self/fd/{entry}")
        except FileNotFoundError:  # the listing's own
            continue
        if "/memfd:" not in target and not target.startswith(("socket:", "pipe:", "anon_inode:", "/dev/shm/")):
            continue
        yield re.sub(r"\d+", "N", target)
    for line in Path("/proc/self/maps").read_text().splitlines():
        if "/memfd:" in line:
            yield "mapping of " + re.sub(r"\d+", "N", line[line.index("/memfd:") :])


def _left_behind(before: Held, watched: Iterable[psutil.Process] = ()) -> list[str]:
    """What is held beyond ``before``, after it has had `PATIENCE_S` to vanish."""
    deadline = time.monotonic() + PATIENCE_S
    while (left := Held.now(watched).beyond(before)) and time.monotonic() < deadline:
        time.sleep(0.1)
    return left


def _session_fixtures_of(request: pytest.FixtureRequest) -> Iterator[str]:
    """The session fixtures that the tests of this module ask for, in the order of need."""
    for item in request.session.items:
        if isinstance(item, pytest.Function) and item.module is request.module:
            for name, definitions in item._fixtureinfo.name2fixturedefs.items():
                if definitions[-1].scope == "session":
                    yield name


@pytest.fixture(scope="session", autouse=True)
def lasting_template() -> Iterator[None]:
    """All hosts of this process, and of those that its tests start, are forked from one template: torch comes once.

    A module whose subject is how a host begins takes `no_lasting_template`.
    """
    with tempfile.TemporaryDirectory(prefix="mb") as folder, pytest.MonkeyPatch.context() as patch:
        path = Path(folder) / "hosts"
        with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as listener:
            listener.bind(str(path))
            listener.listen()
            with open(Path(folder) / "template.log", "wb") as log:
                process = exec_with(listener, [HOST_TEMPLATE, AGENT], log.fileno())
        patch.setenv(LASTING, str(path))
        yield
        process.kill()
        process.wait()


@pytest.fixture(scope="module")
def no_lasting_template() -> Iterator[None]:
    """Hosts of the module begin as those of a person do."""
    with pytest.MonkeyPatch.context() as patch:
        patch.delenv(LASTING)
        yield


@pytest.fixture(scope="session")
def watched_processes() -> list[psutil.Process]:
    """Processes that must be gone when their module ends, whoever is their parent by then."""
    return []


@pytest.fixture
def watch(watched_processes: list[psutil.Process]) -> Callable[[Iterable[psutil.Process]], None]:
    """Hold processes to the rule of this file even when they lose their parent."""
    return watched_processes.extend


@pytest.fixture(scope="module", autouse=True)
def leaves_nothing_behind(request: pytest.FixtureRequest, watched_processes: list[Any]) -> Iterator[None]:
    """Fail the module that leaves anything behind; see the top of this file."""
    for name in dict.fromkeys(_session_fixtures_of(request)):
        request.getfixturevalue(name)
    before = Held.now()
    yield
    left = _left_behind(before, watched_processes)
    watched_processes.clear()
    if left:
        pytest.fail(f"{request.module.__name__} left behind:\n  " + "\n  ".join(left), pytrace=False)
