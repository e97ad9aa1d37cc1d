"""``meshbook list``, ``stop``, ``logs`` and ``stacks``, on meshes that other processes drive or have left."""

from __future__ import annotations

import json
import re
import signal
import socket
import subprocess
from collections.abc import Callable
from pathlib import Path

import pexpect
import psutil
import pytest
from controllers import Driver
from patience import wait_until

from tests.runtime.cli.conftest import COMMAND, Run

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]

Start = Callable[[str], Driver]

SPAWN = """
mesh = this_host().spawn_procs({"gpus": 2}, name="kept", device="cpu")
mesh.run("print('rank', rank, 'is up')").get(120)
say("session", mesh.session)
"""
WAIT = """
wait()
say("alive", mesh.alive)
try:
    mesh.run("1").get(60)
except MeshError as error:
    say("error", error)
wait()
"""
HANG = """
call = mesh.run('''
import time
if rank:
    dist.all_reduce(torch.ones(1))
else:
    print("now I sleep")
    time.sleep(600)
''')
say("hangs")
try:
    call.get(600)
except MeshError as error:
    say("error", error)
wait()
"""
IMPORT = "from meshbook.errors import MeshError\n"


@pytest.fixture
def driver(start: Start, watch: Callable[..., None]) -> Driver:
    """A process that drives two ranks and waits."""
    return started(start(IMPORT + SPAWN + WAIT), watch)


@pytest.fixture
def hung(start: Start, watch: Callable[..., None]) -> Driver:
    """A process that waits for two ranks of which one never comes to the collective of the other."""
    driver = started(start(IMPORT + SPAWN + HANG), watch)
    driver.expect("hangs")
    return driver


def started(driver: Driver, watch: Callable[..., None]) -> Driver:
    driver.session = driver.expect("session")  # type: ignore[attr-defined]
    driver.ranks = list(driver.agents())  # type: ignore[attr-defined]
    watch(driver.family())
    return driver


def all_gone(driver: Driver) -> bool:
    family: list[psutil.Process] = driver.ranks  # type: ignore[attr-defined]
    return not [process for process in psutil.wait_procs(family, timeout=30)[1] if process.is_running()]


def test_the_list_has_each_mesh_and_who_has_it(meshbook: Run, driver: Driver) -> None:
    told = meshbook("list")
    assert (told.returncode, told.stderr) == (0, "")
    head, line = told.stdout.splitlines()
    assert head.split("  ")[0] == "mesh"
    assert re.fullmatch(rf"kept +gpus=2 +up \d+ \w+ +belongs to process {driver.pid} +{driver.session}", line)  # type: ignore[attr-defined]
    (plain,) = json.loads(meshbook("list", "--json").stdout)
    assert (plain["mesh"], plain["axes"], plain["owner_pid"], plain["waits_s"]) == (
        "kept",
        {"gpus": 2},
        driver.pid,
        None,
    )
    assert meshbook("list", "--names").stdout == "kept\n"
    driver.kill()
    assert "left by its notebook, waits for " in meshbook("list").stdout
    (plain,) = json.loads(meshbook("list", "--json").stdout)
    assert plain["owner_pid"] is None and 0 < plain["waits_s"] <= 60
    assert meshbook("stop", "kept").returncode == 0


def test_a_mesh_of_a_living_process_is_stopped_only_when_asked_for(meshbook: Run, driver: Driver) -> None:
    refused = meshbook("stop", "kept")
    assert refused.returncode == 1
    assert (
        f"kept of process {driver.pid}, which is alive. Stop it all the same: meshbook stop kept --yes"
        in refused.stderr
    )
    told = meshbook("stop", "kept", "--yes", "--json")
    assert told.returncode == 0, told.stderr
    assert json.loads(told.stdout) == {"stopped": ["kept"], "session": driver.session}  # type: ignore[attr-defined]
    driver.tell()
    assert driver.expect("alive") == "False"
    assert driver.expect("error").startswith('mesh "kept" was stopped')
    assert "no mesh on this machine" in meshbook("list").stdout


def test_a_terminal_is_asked_first(driver: Driver, meshbook: Run) -> None:
    for answer, says in (("n", "nothing was stopped"), ("y", 'mesh "kept" stopped')):
        terminal = pexpect.spawn(COMMAND[0], [*COMMAND[1:], "stop", "kept"], timeout=60, encoding="utf-8")
        terminal.expect_exact(f"Stop kept of process {driver.pid}, which is alive? [y/N] ")
        terminal.sendline(answer)
        terminal.expect_exact(says)
        terminal.expect(pexpect.EOF)
        terminal.close()
        assert terminal.exitstatus == (1 if answer == "n" else 0)
    assert meshbook("list", "--names").stdout == "\n"


def test_a_waiting_mesh_is_stopped_with_all_its_processes(meshbook: Run, driver: Driver) -> None:
    driver.kill()
    told = meshbook("stop", "kept")
    assert (told.returncode, told.stdout) == (0, 'mesh "kept" stopped\n'), told.stderr
    assert all_gone(driver)


def test_one_of_several_waiting_meshes_is_not_stopped_alone(
    meshbook: Run, start: Start, watch: Callable[..., None]
) -> None:
    more = 'other = this_host().spawn_procs({"gpus": 1}, name="other", torch=False)\n'
    driver = started(start(IMPORT + more + SPAWN + WAIT), watch)
    assert meshbook("logs").returncode == 2
    driver.kill()
    refused = meshbook("stop", "other")
    assert refused.returncode == 1 and f"stop all of them: meshbook stop {driver.session}" in refused.stderr  # type: ignore[attr-defined]
    told = meshbook("stop", driver.session)  # type: ignore[attr-defined]
    assert told.stdout == 'mesh "other" stopped\nmesh "kept" stopped\n', told.stderr
    assert all_gone(driver)


def test_processes_are_ended_by_force_where_their_owner_does_not_answer(meshbook: Run, driver: Driver) -> None:
    driver.process.send_signal(signal.SIGSTOP)
    told = meshbook("stop", "kept", "--yes")
    assert told.returncode == 1
    assert f"process {driver.pid} does not answer: no answer within 15 s" in told.stderr
    assert "meshbook stop kept --force" in told.stderr
    ranks = [each for each in driver.ranks if " kept rank " in " ".join(each.cmdline())]  # type: ignore[attr-defined]
    told = meshbook("stop", "kept", "--yes", "--force")
    assert told.returncode == 0, told.stderr
    assert len(ranks) == 2 and not any(rank.is_running() for rank in ranks)
    driver.process.send_signal(signal.SIGCONT)


def test_stacks_tell_who_holds_the_others_up_while_their_owner_waits(meshbook: Run, hung: Driver) -> None:
    def tells() -> bool:
        told = meshbook("stacks")
        assert told.returncode == 0, told.stderr
        return "rank 1 waits in all_reduce" in told.stdout and "is in time.sleep" in told.stdout

    wait_until(tells, 60)
    plain = json.loads(meshbook("stacks", "kept", "--json").stdout)
    assert [one["state"] for one in plain["ranks"]] == ["busy", "waiting"]
    assert plain["ranks"][0]["threads"]["main"][0]["line"] == 7
    assert meshbook("stop", "kept", "--yes").returncode == 0
    assert hung.expect("error").startswith('mesh "kept" was stopped')


def test_stacks_of_a_waiting_mesh_say_how_to_get_them(meshbook: Run, driver: Driver) -> None:
    driver.kill()
    told = meshbook("stacks", "kept")
    assert told.returncode == 1 and "meshbook attach kept, then %mesh stacks" in told.stderr
    meshbook("stop", "kept")


def test_logs_are_those_of_the_ranks(meshbook: Run, driver: Driver) -> None:
    told = meshbook("logs", "kept")
    assert told.returncode == 0, told.stderr
    assert [line.split(" ")[0] for line in told.stdout.splitlines()] == ["[0]", "rank", "[1]", "rank"]
    assert meshbook("logs", "--rank", "1", "--grep", "up").stdout.endswith("rank 1 is up\n")
    (plain,) = json.loads(meshbook("logs", "--rank", "0", "--json").stdout)
    assert plain["lines"] == ["rank 0 is up"] and Path(plain["path"]).name == "rank-0.log"
    assert "no log of rank 7 is on this machine" in meshbook("logs", "--rank", "7").stderr
    meshbook("stop", "kept", "--yes")


def test_logs_are_followed_until_the_mesh_ends(meshbook: Run, start: Start, watch: Callable[..., None]) -> None:
    write = "wait()\nmesh.run(\"print('later', rank)\").get(60)\nwait()\n"
    driver = started(start(IMPORT + SPAWN + write), watch)
    follower = subprocess.Popen([*COMMAND, "logs", "-f"], stdout=subprocess.PIPE, text=True)
    assert follower.stdout is not None
    assert {follower.stdout.readline(), follower.stdout.readline()} == {"[0] rank 0 is up\n", "[1] rank 1 is up\n"}
    driver.tell()
    assert {follower.stdout.readline(), follower.stdout.readline()} == {"[0] later 0\n", "[1] later 1\n"}
    assert meshbook("stop", "kept", "--yes").returncode == 0
    assert follower.stdout.readline() == "the mesh has ended\n"
    assert follower.wait(60) == 0
    follower.stdout.close()


def test_ctrl_c_ends_a_follower_quietly(driver: Driver, meshbook: Run) -> None:
    follower = subprocess.Popen([*COMMAND, "logs", "-f"], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    assert follower.stdout is not None
    follower.stdout.readline()
    follower.send_signal(signal.SIGINT)
    assert follower.communicate(timeout=60)[1] == "" and follower.returncode == 130
    meshbook("stop", "kept", "--yes")


def test_another_process_takes_a_session_that_its_owner_leaves(driver: Driver, meshbook: Run) -> None:
    from meshbook.sessions.words import find_session
    from meshbook.wire.visits import VisitQuestion, pay_visit

    pay_visit(find_session("kept").path, VisitQuestion("leave"), 30)
    wait_until(lambda: find_session("kept").owner_pid is None)
    driver.tell()
    assert driver.expect("alive") == "False"
    assert driver.expect("error").startswith('mesh "kept" was detached')
    assert meshbook("stop", "kept").returncode == 0
    assert all_gone(driver)


def test_strangers_get_no_answer(driver: Driver, meshbook: Run) -> None:
    """A question that makes no sense is refused in words, and the owner goes on."""
    from meshbook.errors import MeshError
    from meshbook.sessions.words import find_session
    from meshbook.wire.frames import pack
    from meshbook.wire.visits import VisitQuestion, pay_visit

    path = find_session("kept").path
    with pytest.raises(MeshError, match="Invalid enum value"):
        pay_visit(path, VisitQuestion("dance"), 30)  # type: ignore[arg-type]
    with pytest.raises(MeshError, match='mesh "gone" has ended meanwhile'):
        pay_visit(path, VisitQuestion("stop", "gone"), 30)
    with socket.socket(socket.AF_UNIX) as stranger:
        stranger.settimeout(30)
        stranger.connect(f"{path}/control")
        stranger.send(pack([b"nonsense", b""]))
        assert stranger.recv(1) == b"", "it hangs up"
    assert meshbook("stop", "kept", "--yes").returncode == 0
