"""``jupyter console --kernel meshbook`` through a real terminal."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

import pexpect
import psutil
import pytest

pytestmark = pytest.mark.kernel

ALT_ENTER, CONTROL_D = "\x1b\r", "\x04"


@pytest.fixture
def console(installed_kernelspec: object, monkeypatch: pytest.MonkeyPatch) -> Iterator[pexpect.spawn]:
    monkeypatch.setenv("TERM", "xterm")
    process = pexpect.spawn(
        sys.executable,
        ["-m", "jupyter", "console", "--kernel", "meshbook"],
        encoding="utf-8",
        timeout=60,
        dimensions=(50, 200),
    )
    yield process
    process.close(force=True)


def test_console_runs_cells_on_a_mesh_and_ends_cleanly(
    console: pexpect.spawn, watch: Callable[[Iterable[psutil.Process]], None]
) -> None:
    console.expect("Start ranks with %mesh spawn")
    console.expect(r"In \[.*1.*\]: ")
    console.send("%mesh spawn gpus=2 --device cpu\r")
    console.expect(r"gpus=2, cpu, gloo; ready in")
    assert "frozen modules" not in console.before, "advice of the debugger over the first prompt"
    console.expect(r"In \[.*2.*\]: ")
    console.send("%%mesh\r")
    console.expect(r"\.\.\.: ")
    console.send(f"print('hello from', rank){ALT_ENTER}")
    console.expect(r"\[0\] hello from 0\r\n\[1\] hello from 1\r\n")
    console.expect(r"In \[.*3.*\]: ")
    console.send(f"%%mesh\rknown_on_ranks = 1{ALT_ENTER}")
    console.expect(r"In \[.*4.*\]: ")
    console.send("%%mesh rank=0\r")
    time.sleep(1)
    console.send("print(known_on")
    time.sleep(2)  # the console asks the kernel when it has drawn what was typed
    console.send("\t")
    console.expect("_ranks")
    console.send(f" + 41){ALT_ENTER}")
    console.expect(r"\[0\] 42\r\n")
    console.expect(r"In \[.*5.*\]: ")
    watch(psutil.Process(console.pid).children(recursive=True))
    console.send(CONTROL_D)
    console.expect("Do you really want to exit")
    console.send("y\r")
    console.expect(pexpect.EOF)


def test_a_breakpoint_opens_its_prompt_in_the_console(console: pexpect.spawn) -> None:
    console.expect(r"In \[.*1.*\]: ")
    console.send("%mesh spawn gpus=2 --device cpu\r")
    console.expect(r"ready in")
    console.expect(r"In \[.*2.*\]: ")
    console.send("%%mesh\r")
    console.expect(r"\.\.\.: ")
    console.send(f"x = rank + 5; breakpoint(){ALT_ENTER}")
    console.expect(r"ranks 0,1 stopped at cell 2, line 2")
    console.expect_exact("[0] (Pdb) ")
    console.send("cast p x\r")
    console.expect(r"\[0\] 5\r\n\[1\] 6\r\n")
    console.expect_exact("[0] (Pdb) ")
    console.send("cast c\r")
    console.expect(r"In \[.*3.*\]: ")
    console.send(CONTROL_D)
    console.expect("Do you really want to exit")
    console.send("y\r")
    console.expect(pexpect.EOF)


def test_the_prompt_of_a_terminal_names_the_mesh_while_every_cell_goes_there(tmp_path: Path) -> None:
    command = [
        "-m",
        "IPython",
        "--no-banner",
        "--no-confirm-exit",
        "--colors=NoColor",
        "--ext=meshbook",
        "--simple-prompt",
    ]
    environment = {**os.environ, "IPYTHONDIR": str(tmp_path), "TERM": "dumb"}
    terminal = pexpect.spawn(sys.executable, command, env=environment, encoding="utf-8", timeout=60)
    try:
        for line, prompt in [
            ("%mesh spawn gpus=1 --device cpu --no-torch", r"\r\nIn \[2\]: "),
            ("%mesh auto on", r"\r\n\(main\) In \[3\]: "),
            ("%mesh stop", r"\r\n\(no mesh\) In \[4\]: "),
            ("%mesh auto off", r"\r\nIn \[5\]: "),
        ]:
            terminal.sendline(line)
            terminal.expect(prompt)
        terminal.sendline("exit")
        terminal.expect(pexpect.EOF)
    finally:
        terminal.close(force=True)
