"""Programs as they are written for monarch.actor: only their import is another one."""

from __future__ import annotations

import asyncio

import monarch_programs
import pytest

pytestmark = pytest.mark.monarch


@pytest.mark.parametrize("program", [monarch_programs.hello, monarch_programs.ping_pong, monarch_programs.pipeline])
def test_a_program_for_monarch_runs(program: monarch_programs.Program, capfd: pytest.CaptureFixture[str]) -> None:
    assert asyncio.run(program()) == "done"


def test_a_program_without_asyncio_runs() -> None:
    assert monarch_programs.counters() == "done"
