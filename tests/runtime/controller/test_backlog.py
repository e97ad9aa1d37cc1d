"""While too much waits for a slow host new calls wait too, and not a moment longer."""

from __future__ import annotations

import os
import signal

import pytest
from patience import wait_until

from meshbook import LocalLauncher, start_hosts


def test_calls_wait_for_the_slowest_host_and_for_none_that_is_lost(
    clean_end: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("meshbook.controller.dispatcher.MAX_BACKLOG", 10)
    hosts = start_hosts({"hosts": 2}, LocalLauncher())
    with hosts.spawn_procs({"gpus": 1}, device="cpu", group=False, owns_hosts=True) as mesh:
        quick, slow = mesh._mesh.hosts
        dispatcher = mesh._controller._dispatcher
        mesh._controller.ask(lambda: setattr(slow.connection, "window_bytes", 0))
        calls = []
        while not dispatcher.is_full:
            assert len(calls) < 100
            calls.append(mesh.execute(os.getpid))
            mesh._controller.ask(lambda: None)  # so that each is a message of its own
        heard = quick.heard
        wait_until(lambda: quick.heard > heard)
        assert dispatcher.is_full
        assert slow.hello is not None
        os.kill(slow.hello.pid, signal.SIGKILL)
        assert len(mesh.slice(hosts=0).execute(os.getpid).get(20).values()) == 1
        assert all(call.exception(20) is not None for call in calls)
