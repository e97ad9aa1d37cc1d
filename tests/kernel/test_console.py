"""``jupyter console --kernel meshbook`` through a real terminal."""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator

import pexpect
import pytest

ANSI = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]")


@pytest.fixture
def console(installed_kernelspec: object) -> Iterator[pexpect.spawn]:
    process = pexpect.spawn(
        sys.executable,
        ["-m", "jupyter", "console", "--kernel", "meshbook", "--simple-prompt"],
        encoding="utf-8",
        timeout=60,
        dimensions=(50, 200),
    )
    process.expect(r"In \[1\]: ")
    yield process
    process.close(force=True)


def test_console_runs_cells_on_a_mesh_and_ends_cleanly(console: pexpect.spawn) -> None:
    assert "%mesh spawn" in ANSI.sub("", console.before)  # the banner
    console.sendline("%mesh spawn gpus=2 --device cpu")
    console.expect("gpus=2")
    console.expect(r"In \[2\]: ")
    console.sendline("%mesh eval rank + 40")
    console.expect("41")
    console.expect(r"In \[3\]: ")
    console.sendline("exit")
    console.expect(pexpect.EOF)
