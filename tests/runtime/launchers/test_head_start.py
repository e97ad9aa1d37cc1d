"""Agents that are started before their controller is there to write them a ticket."""

from __future__ import annotations

from pathlib import Path

import psutil
import pytest

from meshbook.launchers.starting.head_start import exec_agent, head_start


@pytest.fixture
def logs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    return tmp_path / "meshbook" / "logs"


def test_the_agent_that_is_ahead_is_taken_with_what_it_has_said(logs: Path, tmp_path: Path) -> None:
    with head_start():
        (ahead,) = psutil.Process().children()
        process = exec_agent(tmp_path / "agent.log", {})
        assert process.pid == ahead.pid
        process.communicate(timeout=30)  # no ticket will come, and it says so
    assert process.returncode == 1
    assert "ticket" in (tmp_path / "agent.log").read_text()
    assert list(logs.iterdir()) == []


def test_one_that_nobody_takes_is_ended_and_leaves_nothing(logs: Path, tmp_path: Path) -> None:
    with pytest.raises(ZeroDivisionError), head_start():
        (ahead,) = psutil.Process().children()
        other = exec_agent(tmp_path / "agent.log", {"ITS": "own"})
        assert other.pid != ahead.pid
        other.kill()
        other.communicate()
        raise ZeroDivisionError
    assert not ahead.is_running()
    assert list(logs.iterdir()) == []


def test_where_no_log_can_be_written_there_is_no_head_start(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("meshbook.launchers.starting.head_start.log_base", lambda: Path("/proc/nowhere"))
    with head_start():
        assert psutil.Process().children() == []
