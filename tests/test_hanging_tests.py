"""A test that hangs costs its time and at most its worker, never the run."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

CONFTEST = Path(__file__).with_name("conftest.py")
HANGS = """
import signal, threading, time
import pytest

@pytest.fixture
def ends_never():
    yield
    time.sleep(60)

def test_fails_and_its_teardown_hangs(ends_never):
    assert False

def test_hangs_where_no_alarm_is_heard():
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGALRM})
    threading.Event().wait()

def test_leaves_a_thread_that_never_ends():
    threading.Thread(target=threading.Event().wait).start()
"""


@pytest.mark.slow
def test_whatever_hangs_is_ended_and_shows_where_it_was(tmp_path: Path) -> None:
    text = (
        CONFTEST.read_text().replace("GRACE_S = 60.0", "GRACE_S = 2.0").replace("PATIENCE_S = 10.0", "PATIENCE_S = 0.1")
    )
    (tmp_path / "conftest.py").write_text(text)
    (tmp_path / "test_hangs.py").write_text(HANGS)
    pytest = [
        sys.executable,
        "-m",
        "pytest",
        "-q",
        "-n",
        "1",
        "--timeout",
        "1",
        "--rootdir",
        str(tmp_path),
        str(tmp_path),
    ]
    done = subprocess.run(pytest, capture_output=True, text=True, timeout=100)
    assert "ERROR at teardown of test_fails_and_its_teardown_hangs" in done.stdout, done.stdout
    assert "Timeout (>1.0s) from pytest-timeout" in done.stdout
    assert "crashed while running 'test_hangs.py::test_hangs_where_no_alarm_is_heard'" in done.stdout
    assert "2 failed, 1 passed, 2 errors" in done.stdout, done.stdout
    assert "in test_hangs_where_no_alarm_is_heard" in done.stderr, done.stderr
