"""A shell on a host, at a terminal."""

from __future__ import annotations

import os
import pty
import subprocess
import sys
from collections.abc import Iterator

import pytest
from patience import wait_until

from meshbook.errors import UsageError
from meshbook.job import ProcessJob, shell

pytestmark = pytest.mark.monarch

PROGRAM = """
import sys
from meshbook.job import ProcessJob, shell
job = ProcessJob({"hosts": 2})
code = shell(job.state().hosts.slice(hosts=1), env={"SHELL": "/bin/sh", "PS1": "there> ", "WHO": "me"}, workdir="/")
job.kill()
print("the shell ended with", code, flush=True)
sys.exit(code)
"""


class TypedProgram:
    """A program at a terminal whose other end we have."""

    def __init__(self) -> None:
        self.end, other = pty.openpty()
        self.process = subprocess.Popen([sys.executable, "-c", PROGRAM], stdin=other, stdout=other, stderr=other)
        os.close(other)
        self.said = b""

    def expect(self, text: str) -> None:
        """Read on until it has said this."""
        while text.encode() not in self.said:
            self.said += os.read(self.end, 4096)
        self.said = self.said.partition(text.encode())[2]

    def type(self, line: str) -> None:
        os.write(self.end, line.encode() + b"\n")


@pytest.fixture
def program() -> Iterator[TypedProgram]:
    started = TypedProgram()
    yield started
    if started.process.poll() is None:
        started.process.kill()
    started.process.wait()
    os.close(started.end)


def test_a_shell_runs_what_is_typed(program: TypedProgram) -> None:
    program.expect("there> ")
    program.type('echo "$WHO is in $PWD: $((6*7))"')
    program.expect("me is in /: 42")
    program.type("sleep 1000; echo $((40+3))")
    program.expect("sleep 1000")
    os.write(program.end, b"\x03")  # Ctrl-C reaches what runs there, and not the program
    program.expect("there> ")
    program.type("tty >/dev/null && echo is-a-$((1+1))-tty; exit 5")
    program.expect("is-a-2-tty")
    program.expect("the shell ended with 5")
    wait_until(lambda: program.process.poll() == 5)


def test_a_shell_wants_one_host_and_a_terminal() -> None:
    job = ProcessJob({"hosts": 2})
    hosts = job.state().hosts
    try:
        with pytest.raises(UsageError, match="on one host, not on 2"):
            shell(hosts)
        with pytest.raises(UsageError, match="needs a terminal"):
            shell(hosts.slice(hosts=0))
    finally:
        job.kill()
