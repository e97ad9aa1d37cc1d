"""Agents that are started before their controller is there to write them a ticket."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import psutil
import pytest

from meshbook.launchers.agent_start import exec_agent, head_start

pytestmark = [pytest.mark.cluster, pytest.mark.usefixtures("no_lasting_template")]


Started = Callable[[], list[psutil.Process]]


@pytest.fixture
def logs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    return tmp_path / "meshbook" / "logs"


@pytest.fixture
def started() -> Started:
    """What has begun as our child since the test began."""
    before = psutil.Process().children()
    return lambda: [child for child in psutil.Process().children() if child not in before]


def test_the_agent_that_is_ahead_is_taken_with_what_it_has_said(logs: Path, tmp_path: Path, started: Started) -> None:
    with head_start():
        (ahead,) = started()
        process = exec_agent(tmp_path / "agent.log", {})
        assert process.pid == ahead.pid
        process.communicate(timeout=30)  # no ticket will come, and it says so
    assert process.returncode == 1
    assert "ticket" in (tmp_path / "agent.log").read_text()
    assert list(logs.iterdir()) == []


def test_one_that_nobody_takes_is_ended_and_leaves_nothing(logs: Path, tmp_path: Path, started: Started) -> None:
    with pytest.raises(ZeroDivisionError), head_start():
        (ahead,) = started()
        other = exec_agent(tmp_path / "agent.log", {"ITS": "own"})
        assert other.pid != ahead.pid
        other.kill()
        other.communicate()
        raise ZeroDivisionError
    assert not ahead.is_running()
    assert list(logs.iterdir()) == []


def test_where_no_log_can_be_written_there_is_no_head_start(monkeypatch: pytest.MonkeyPatch, started: Started) -> None:
    monkeypatch.setattr("meshbook.launchers.agent_start.log_base", lambda: Path("/proc/nowhere"))
    with head_start():
        assert started() == []
