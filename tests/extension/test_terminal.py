"""``meshbook attach``: IPython in a real terminal, on a mesh that waits, or that its owner has to leave."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator

import pexpect
import pytest
from controllers import Driver, Zygote, alone
from patience import wait_until

from meshbook import sessions

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]

SPAWN = """
from meshbook.errors import MeshError
mesh = this_host().spawn_procs({"gpus": 2}, name="kept", device="cpu")
mesh.run("state = rank + 40").get(120)
say("session", mesh.session)
wait()
try:
    mesh.run("1").get(60)
except MeshError as error:
    say("error", error)
wait()
"""

Attach = Callable[..., pexpect.spawn]


@pytest.fixture(scope="module")
def zygote() -> Iterator[Zygote]:
    with alone() as zygote:
        yield zygote


@pytest.fixture
def driver(zygote: Zygote, watch: Callable[..., None]) -> Iterator[Driver]:
    driver = zygote.start(SPAWN)
    driver.expect("session")
    watch(driver.family())
    yield driver
    driver.close()
    zygote.drivers.clear()


@pytest.fixture
def attach(monkeypatch: pytest.MonkeyPatch) -> Iterator[Attach]:
    """Run ``meshbook attach WORDS`` in a terminal."""
    monkeypatch.setenv("TERM", "xterm")
    opened = []

    def run(*words: str) -> pexpect.spawn:
        command = ["-m", "meshbook.cli", "attach", *words]
        opened.append(pexpect.spawn(sys.executable, command, timeout=120, encoding="utf-8", dimensions=(50, 200)))
        return opened[-1]

    yield run
    for terminal in opened:
        terminal.close(force=True)


def stop_the_mesh(terminal: pexpect.spawn) -> None:
    """See that the magics work on the ranks as they were, and end the mesh with the terminal."""
    terminal.expect_exact('mesh "kept"')
    terminal.expect(r"In \[.*\d.*\]: ")
    terminal.send("%mesh eval state\r")
    terminal.expect(r"\[0\].*40")
    terminal.expect(r"\[1\].*41")
    terminal.expect(r"In \[.*\d.*\]: ")
    terminal.send("%mesh stop\r")
    terminal.expect_exact('mesh "kept" stopped')
    leave(terminal)
    assert sessions() == []


def leave(terminal: pexpect.spawn) -> None:
    terminal.expect(r"In \[.*\d.*\]: ")
    terminal.send("exit\r")
    terminal.expect(pexpect.EOF)
    terminal.close()
    assert terminal.exitstatus == 0


def test_a_mesh_that_waits_goes_on_in_a_terminal_and_waits_again(driver: Driver, attach: Attach) -> None:
    driver.kill()
    terminal = attach("kept")
    terminal.expect_exact("it waits again")
    leave(terminal)
    (session,) = sessions()
    assert session.owner_pid is None and [mesh.name for mesh in session.meshes] == ["kept"]
    stop_the_mesh(attach("kept"))


def test_a_mesh_of_a_living_process_is_taken_only_after_a_question(driver: Driver, attach: Attach) -> None:
    refused = attach("kept")
    refused.expect_exact(f'mesh "kept" belongs to process {driver.pid}, which is alive.')
    refused.expect_exact("take it over: meshbook attach kept --take")
    refused.expect(pexpect.EOF)
    refused.close()
    assert refused.exitstatus == 1
    declined = attach("kept", "--take")
    declined.expect_exact("and loses kept. Take it? [y/N] ")
    declined.sendline("n")
    declined.expect_exact("nothing was taken")
    declined.expect(pexpect.EOF)
    terminal = attach("kept", "--take")
    terminal.expect_exact("[y/N] ")
    terminal.sendline("y")
    wait_until(lambda: [each.owner_pid for each in sessions()] == [terminal.pid], 60)
    driver.tell()
    assert driver.expect("error").startswith('mesh "kept" was detached')
    stop_the_mesh(terminal)


def test_a_name_that_is_none_is_refused(driver: Driver, attach: Attach) -> None:
    unknown = attach("kep")
    unknown.expect_exact('there is no session or mesh "kep" here')
    unknown.expect_exact('Did you mean "kept"?')
    unknown.expect(pexpect.EOF)
    unknown.close()
    assert unknown.exitstatus == 1
