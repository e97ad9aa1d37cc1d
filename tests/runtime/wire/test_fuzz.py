"""A short form of ``python -m benchmarks.fuzz``: whatever comes over the wire is refused, and leaves nothing behind."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]


@pytest.mark.slow
def test_nothing_that_comes_over_the_wire_does_harm() -> None:
    command = [sys.executable, "-m", "benchmarks.fuzz", "--frames", "20000", "--handshakes", "1000"]
    fuzzed = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=100, check=False)
    assert fuzzed.returncode == 0, fuzzed.stdout + fuzzed.stderr
    assert "no byte reached a pickle" in fuzzed.stdout
