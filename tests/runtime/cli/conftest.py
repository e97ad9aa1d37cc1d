"""Commands as a terminal runs them, beside processes that drive meshes."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from typing import TypeAlias

import pytest
from controllers import Driver, Zygote, alone

Run: TypeAlias = Callable[..., "subprocess.CompletedProcess[str]"]

COMMAND = [sys.executable, "-m", "meshbook.cli"]


@pytest.fixture
def meshbook() -> Run:
    """Run ``meshbook WORDS``; the exit code and all that it says."""

    def run(*words: str, text: str = "") -> subprocess.CompletedProcess[str]:
        environment = {**os.environ, "COLUMNS": "80"}
        return subprocess.run(
            [*COMMAND, *words], input=text, capture_output=True, text=True, timeout=120, env=environment
        )

    return run


@pytest.fixture(scope="module")
def zygote() -> Iterator[Zygote]:
    with alone() as zygote:
        yield zygote


@pytest.fixture
def start(zygote: Zygote) -> Iterator[Callable[[str], Driver]]:
    """Run code in a process of its own, which ends with the test."""
    yield zygote.start
    for driver in zygote.drivers:
        driver.close()
    zygote.drivers.clear()
