"""Forks by user code (DataLoader workers, process pools, ``os.fork()``), and the duties of our parts in a child.

A forked child has one thread, and a copy of all else: sockets whose other end takes it for its parent, locks of threads
that it lacks, counters that will give the same names again. So

    a voice of a process        notes the `generation` that made it, and refuses in any other (`refuse_inherited`)
    a thing that acts alone     registers a function that makes it harmless (`at_fork`)
    memory of others             is given back when no child sees it any more (`meshbook.values.lent_memory`)

A process that is started afresh (`subprocess`, multiprocessing's ``spawn``) inherits nothing, and runs none of this.
Neither does one that C code forks without telling Python.
"""

from __future__ import annotations

import _thread
import os
import signal
import sys
import threading
import traceback
from collections import deque
from collections.abc import Callable, Iterator
from functools import partial
from itertools import chain

from meshbook.errors import UsageError

generation = 0
"""The number of forks between this process and the one that imported this package."""

main_thread = threading.main_thread().ident
"""The thread that runs signal handlers, as `threading.get_ident` names it."""

_pids = [os.getpid()]
"""The processes of those generations; the last is this one."""

_before: list[Callable[[], object]] = []
_in_parent: list[Callable[[], object]] = []
_in_child: list[Callable[[], object]] = []
_releases: list[_Release] = []
"""The last of them ends a fork: it comes behind the hooks of all modules that were imported by then."""


def at_fork(
    *,
    before: Callable[[], object] | None = None,
    in_parent: Callable[[], object] | None = None,
    in_child: Callable[[], object] | None = None,
) -> None:
    """Have these called at each fork from now on, on the thread that forks, in the order of registration.

    in_parent: also when the fork has failed. in_child: `generation` has changed by then.
    """
    for actions, action in ((_before, before), (_in_parent, in_parent), (_in_child, in_child)):
        if action is not None:
            actions.append(action)
    _releases.append(_Release())
    end = partial(deque[object](maxlen=0).extend, _releases[-1])
    os.register_at_fork(before=_hold_interrupts, after_in_parent=end, after_in_child=end)


class ForkLock:
    """A reentrant lock that is free in a forked child, whoever held it at the fork: ``with guard.lock: ...``."""

    def __init__(self) -> None:
        self.lock = threading.RLock()
        at_fork(in_child=self._renew)

    def _renew(self) -> None:
        self.lock = threading.RLock()


def refuse_inherited(made_in: int) -> None:
    """Raises: UsageError where generation ``made_in`` is that of a process that forked this one."""
    if made_in != generation:
        raise UsageError(
            f"process {os.getpid()} was forked from process {_pids[made_in]}, and cannot use its meshes, actors, ports "
            f"and process groups. Use them in process {_pids[made_in]} and hand the values to its children: a "
            "DataLoader whose dataset calls actors needs num_workers=0."
        )


def _run(actions: list[Callable[[], object]]) -> None:
    for action in actions:
        try:
            action()
        except Exception:  # the others count too
            traceback.print_exc(file=sys.__stderr__)


def _be_another() -> None:
    global generation, main_thread
    main_thread = threading.get_ident()
    _hold_interrupts()
    _pressed.clear()  # those before the fork are the parent's
    generation += 1
    _pids.append(os.getpid())
    _run(_in_child)


# ---- interrupts -----------------------------------------------------------------------------------------------------
# Python prints what a hook raises, and drops it. So interrupts are noted while the hooks run, and come after the last.

INTERRUPTS = {signal.SIGINT}
"""The signals whose handlers may raise. A rank has one of its own (`meshbook.worker.interrupt_gate`)."""

held: dict[signal.Signals, object] = {}
"""The handlers that are put back at the end of the fork that is under way, by signal; empty where there is none."""

_pressed: list[signal.Signals] = []
_signals = vars(signal)["_signal"]  # its functions make no enumerations


def _hold_interrupts() -> None:
    if held or threading.get_ident() != main_thread:
        return
    _pressed.clear()
    for each in INTERRUPTS:
        if callable(handler := _signals.getsignal(each)):
            held[each] = handler
            _signals.signal(each, lambda signum, frame: _pressed.append(signal.Signals(signum)))


class _Release:
    """The last steps of a fork, for C code to take: an interrupt would be raised between two lines of a hook."""

    def __iter__(self) -> Iterator[object]:
        if self is not _releases[-1] or not held or threading.get_ident() != main_thread:
            return iter(())
        signums, handlers = tuple(held), tuple(held.values())
        held.clear()
        return chain(map(_signals.signal, signums, handlers), map(_thread.interrupt_main, _pressed))


os.register_at_fork(before=lambda: _run(_before), after_in_parent=lambda: _run(_in_parent), after_in_child=_be_another)
