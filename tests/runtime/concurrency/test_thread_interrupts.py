"""KeyboardInterrupt on threads other than the main one."""

from __future__ import annotations

import queue
import subprocess
import sys
import threading
import time
import types
from collections.abc import Callable, Generator

import pytest

from meshbook.concurrency.future import Future
from meshbook.concurrency.interrupts import ThreadGate, interruptible


class Thread:
    """Runs functions as calls 1, 2, ... of a thread with a gate, and notes how each ended."""

    def __init__(self, *calls: Callable[[ThreadGate], object]) -> None:
        self.ended: list[str] = []
        self.running = 0
        self._calls = calls
        self._ready = threading.Event()
        self._thread = threading.Thread(target=self._run)
        self._thread.start()
        self._ready.wait(5)

    def _run(self) -> None:
        self.gate = ThreadGate()
        self._ready.set()
        try:
            for serial, call in enumerate(self._calls, 1):
                self.running = serial
                try:
                    try:
                        self.gate.open(serial)
                        call(self.gate)
                    finally:
                        self.gate.close()
                    self.ended.append("done")
                except KeyboardInterrupt:
                    self.gate.close()
                    self.ended.append("interrupted")
        finally:
            self.gate.end()

    def wait_for(self, serial: int) -> None:
        deadline = time.monotonic() + 5
        while self.running < serial and time.monotonic() < deadline:
            time.sleep(0.001)

    def join(self) -> list[str]:
        self._thread.join(20)
        assert not self._thread.is_alive()
        return self.ended


def spin(gate: ThreadGate) -> None:
    while True:
        pass


@pytest.mark.parametrize(
    "wait",
    [
        spin,
        lambda gate: time.sleep(60),
        lambda gate: threading.Event().wait(),
        lambda gate: queue.Queue[int]().get(),
        lambda gate: threading.Semaphore(0).acquire(timeout=60),
        lambda gate: Future[int]().get(60),
    ],
    ids=["spins", "sleeps", "event", "queue", "semaphore", "future"],
)
def test_an_interrupt_ends_waits(wait: Callable[[ThreadGate], object]) -> None:
    thread = Thread(wait, lambda gate: None)
    time.sleep(0.1)
    assert thread.gate.interrupt(1)
    assert thread.join() == ["interrupted", "done"]


def test_only_the_call_that_is_meant_is_interrupted() -> None:
    thread = Thread(lambda gate: None, lambda gate: time.sleep(0.3))
    thread.wait_for(2)
    assert not thread.gate.interrupt(1)
    assert not thread.gate.interrupt(3)
    assert thread.join() == ["done", "done"]
    assert not thread.gate.interrupt(2)


def test_what_must_not_be_torn_is_interrupted_at_its_end() -> None:
    steps: list[int] = []

    def call(gate: ThreadGate) -> None:
        with gate:
            for step in range(10):
                time.sleep(0.02)
                steps.append(step)
        steps.append(100)

    thread = Thread(call)
    time.sleep(0.05)
    thread.gate.interrupt(1)
    assert thread.join() == ["interrupted"]
    assert steps == list(range(10))


def test_interrupts_at_any_moment_tear_nothing_and_hit_nothing_else() -> None:
    pairs = [0, 0]

    def call(gate: ThreadGate) -> None:
        for _ in range(30):
            with gate:
                pairs[0] += 1
                sum(range(20))
                pairs[1] += 1

    thread = Thread(*[call] * 2000)
    while thread._thread.is_alive():
        thread.gate.interrupt(thread.running)
    ended = thread.join()
    assert len(ended) == 2000
    assert "interrupted" in ended
    assert pairs[0] == pairs[1]


def test_other_threads_wait_as_ever() -> None:
    Thread(lambda gate: None).join()
    started = time.monotonic()
    time.sleep(0.12)
    assert not threading.Event().wait(0.12)
    with pytest.raises(ValueError, match="negative"):
        time.sleep(-1)
    assert time.monotonic() - started >= 0.24


@types.coroutine
def _wait() -> Generator[None, None, None]:
    yield


def test_an_interrupt_that_comes_as_a_step_ends_is_raised_in_the_next() -> None:
    ended: list[str] = []
    goes_on = threading.Event()

    async def endpoint() -> None:
        goes_on.wait(20)
        try:
            await _wait()
        except KeyboardInterrupt:
            ended.append("interrupted")

    gates: list[ThreadGate] = []

    def run() -> None:
        gates.append(ThreadGate())
        try:
            steps = interruptible(gates[0], 1, endpoint())
            next(steps, None)
            steps.close()
        finally:
            gates[0].end()

    thread = threading.Thread(target=run)
    thread.start()
    until = time.monotonic() + 20
    while not (gates and gates[0].running) and time.monotonic() < until:
        time.sleep(0.001)
    gate = gates[0]
    with gate._lock:  # the thread cannot close the gate meanwhile
        goes_on.set()
        while sys._current_frames()[thread.ident or 0].f_code is not ThreadGate.close.__code__:
            assert time.monotonic() < until
            time.sleep(0.001)
        gate._raise()
    thread.join(20)
    assert ended == ["interrupted"]


TRACED = """
import sys, threading, time
from meshbook.concurrency.interrupts import ThreadGate

def run():
    gate = ThreadGate()
    gates.append(gate)
    for serial in range(1, 200):
        try:
            try:
                gate.open(serial)
                for _ in range(2000):
                    pass
            finally:
                gate.close()
        except KeyboardInterrupt:
            gate.close()  # it may have come just before it was
    gate.end()

gates = []
thread = threading.Thread(target=run)
thread.start()
while not gates:  # an event that is set where interrupts come may stay locked for ever
    time.sleep(0.001)
told = 0
while thread.is_alive():  # once in each: one more could come on the way into the second close
    if (running := gates[0].running) != told and gates[0].interrupt(running):
        told = running
calls = 0
def count(*event):
    global calls
    calls += 1
sys.setprofile(count)
(lambda: 0)()
sys.setprofile(None)
print(calls)
"""


def test_a_debugger_or_profiler_gets_past_the_interrupts_that_were() -> None:
    """In a process of its own: where it does not, no alarm is heard."""
    done = subprocess.run([sys.executable, "-c", TRACED], capture_output=True, text=True, timeout=100)
    assert int(done.stdout) >= 2, done.stderr
