"""The host agent's loop."""

from __future__ import annotations

import os

from meshbook.system.event_loop import EventLoop


def test_a_descriptor_closed_in_the_same_batch_gets_no_event() -> None:
    loop = EventLoop()
    first, first_end = os.pipe()
    second, second_end = os.pipe()
    seen: list[str] = []
    watches = {}

    def on(name: str, other: str) -> None:
        seen.append(name)
        loop.forget(watches[other])

    watches["first"] = loop.watch(first, lambda: on("first", "second"))
    watches["second"] = loop.watch(second, lambda: on("second", "first"))
    os.write(first_end, b"x")
    os.write(second_end, b"x")
    loop.run_once()
    assert len(seen) == 1
    for fd in (first, first_end, second, second_end):
        os.close(fd)


def test_timers_run_in_order_and_wake_the_loop() -> None:
    loop = EventLoop()
    seen: list[int] = []
    loop.call_later(0.02, lambda: seen.append(2))
    loop.call_later(0.01, lambda: seen.append(1))
    while len(seen) < 2:
        loop.run_once()
    assert seen == [1, 2]


def test_a_writable_descriptor_is_reported_only_while_wanted() -> None:
    loop = EventLoop()
    reading, writing = os.pipe()
    seen: list[str] = []
    watch = loop.watch(writing, lambda: None, lambda: seen.append("writable"))
    loop.want_writable(watch, True)
    loop.run_once()
    loop.want_writable(watch, False)
    loop.call_later(0.01, lambda: seen.append("timer"))
    loop.run_once()
    assert seen == ["writable", "timer"]
    loop.forget(watch)
    os.close(reading)
    os.close(writing)
