"""Ranks that ended come back: in their places, in the groups, while the others keep what they had."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Container
from pathlib import Path
from typing import Any

import psutil
import pytest
from far_hosts import MovedLauncher
from patience import kill, wait_until
from template_processes import children_of, torch_templates_of

from meshbook import DeviceMeshError, LocalLauncher, ProcMesh, errors, heal_mesh, start_hosts, this_host
from meshbook.controller.startup import CrashLoops
from meshbook.mesh.rank_calls import set_axes
from meshbook.system.processes import is_same_process, start_time

pytestmark = pytest.mark.usefixtures("no_lasting_template")

SUM = "t = torch.ones(2); dist.all_reduce(t); int(t[0])"


def await_dead(mesh: ProcMesh, *ranks: int) -> None:
    wait_until(lambda: set(ranks) <= {status.rank for status in mesh.base().status() if status.state == "dead"}, 10)


def test_a_dead_rank_comes_back_and_the_others_keep_their_state(mesh4: ProcMesh) -> None:
    mesh4.run("x = rank * 10").get(30)
    before = [status.pid for status in mesh4.status()]
    kill(mesh4, 2)
    started = time.monotonic()
    assert heal_mesh(mesh4) is mesh4
    assert time.monotonic() - started < 10
    repaired = mesh4.last_repair
    assert repaired is not None and repaired.ranks == (2,) and repaired.joined
    assert str(repaired).startswith('mesh "four": rank 2 started again, all 4 ranks joined in ')
    assert mesh4.run(SUM).get(30).values() == [4] * 4
    assert mesh4.evaluate("globals().get('x')").get(30).values() == [0, 10, None, 30]
    after = [status.pid for status in mesh4.status()]
    assert [old == new for old, new in zip(before, after, strict=True)] == [True, True, False, True]
    who = "(rank, local_rank, world_size, point['gpus'], os.environ['RANK'], os.environ['WORLD_SIZE'], mesh.size())"
    assert mesh4.run(f"import os; {who}").get(30).values()[2] == (2, 2, 4, 2, "2", "4", 4)


def test_a_slice_is_returned_when_its_mesh_was_healed_and_a_script_is_told_on_stderr(
    mesh2: ProcMesh, capsys: pytest.CaptureFixture[str]
) -> None:
    part = mesh2.slice(gpus=0)
    assert mesh2.last_repair is None and part.last_repair is None
    kill(mesh2, 1)
    capsys.readouterr()
    assert heal_mesh(part) is part
    repaired = part.last_repair
    assert repaired is not None and repaired.ranks == (1,) and mesh2.last_repair is repaired
    assert capsys.readouterr() == ("", f"{repaired}\n")
    assert heal_mesh(mesh2, ["x = 1"]) is mesh2
    assert capsys.readouterr() == ("", 'mesh "two" is whole: nothing to heal\n')


def test_a_mesh_keeps_the_report_of_its_last_repair(mesh2: ProcMesh, capsys: pytest.CaptureFixture[str]) -> None:
    part = mesh2.slice(gpus=1)
    reports = [mesh2.respawn(0), part.heal()]
    assert reports[0].ranks == (0,) and reports[1].ranks == ()
    assert mesh2.last_repair is part.last_repair is reports[1]
    kill(mesh2, 1)
    with pytest.raises(errors.CallFailed):
        mesh2.heal(["1 / 0"])
    assert mesh2.last_repair is reports[1], "a repair that failed has no report"
    assert capsys.readouterr().err == "", "heal and respawn return what heal_mesh prints"


def test_a_script_whose_stderr_is_closed_is_healed(mesh2: ProcMesh, monkeypatch: pytest.MonkeyPatch) -> None:
    with open(os.devnull, "w") as closed:
        monkeypatch.setattr(sys, "stderr", closed)
    assert heal_mesh(mesh2) is mesh2


@pytest.mark.parametrize("given", [3, None, "mesh", ProcMesh], ids=str)
def test_what_is_no_mesh_is_refused_by_name(given: Any) -> None:
    with pytest.raises(errors.UsageError, match=r"heal_mesh takes a ProcMesh, a meshbook\.distributed\.Mesh") as caught:
        heal_mesh(given)
    assert repr(given) in str(caught.value)


@pytest.mark.parametrize("setup", ["x = 1", 3, [3]], ids=str)
def test_setup_that_is_no_list_of_cells_is_refused_before_the_repair(mesh2: ProcMesh, setup: Any) -> None:
    with pytest.raises(errors.UsageError, match="setup is a list of cells"):
        heal_mesh(mesh2, setup)
    assert mesh2.last_repair is None


def test_respawn_ends_a_rank_that_is_stuck_and_fails_its_calls(mesh4: ProcMesh) -> None:
    call = mesh4.slice(gpus=1).run("import time\nwhile True:\n  try: time.sleep(60)\n  except KeyboardInterrupt: pass")
    time.sleep(0.2)
    repaired = mesh4.respawn(1)
    assert repaired.ranks == (1,)
    with pytest.raises(errors.WorkerLost, match=r"rank 1 on .* ended: it was respawned"):
        call.get(5)
    assert mesh4.run(SUM).get(30).values() == [4] * 4


def test_the_new_rank_goes_on_in_the_log_of_the_old_one(mesh4: ProcMesh) -> None:
    mesh4.slice(gpus=3).run("print('before the end')").get(30)
    path = mesh4.log_paths()[3]
    mesh4.respawn([3])
    mesh4.slice(gpus=3).run("print('after it')").get(30)
    assert mesh4.log_paths()[3] == path
    text = mesh4.logs(50)[3]
    assert text.index("before the end") < text.index("after it")


def test_setup_cells_run_on_the_new_ranks_only(mesh4: ProcMesh) -> None:
    mesh4.run("count = 7").get(30)
    kill(mesh4, 0, 1)
    repaired = mesh4.heal(["base = 5", "count = base + rank"])
    assert (repaired.ranks, repaired.setup_cells) == ((0, 1), 2)
    assert mesh4.pull("count").get(30).values() == [5, 6, 7, 7]


def test_a_setup_cell_cannot_wait_for_the_others(mesh4: ProcMesh) -> None:
    with pytest.raises(errors.CallFailed, match="rank 3 raised"):
        mesh4.respawn(3, [SUM])
    assert mesh4.run(SUM).get(30).values() == [4] * 4


def test_split_axes_are_kept() -> None:
    with this_host().spawn_procs({"gpus": 4}, name="split") as mesh:
        set_axes(mesh.split(gpus=("dp", "tp"), tp=2)).get(30)
        kill(mesh, 1)
        mesh.heal()
        assert mesh.run("(mesh.mesh_dim_names, dict(point))").get(30).values()[1] == (("dp", "tp"), {"dp": 0, "tp": 1})


def test_a_mesh_without_a_group_is_healed_without_one() -> None:
    with this_host().spawn_procs({"gpus": 2}, group=False) as mesh:
        kill(mesh, 0)
        mesh.heal()
        who = "import os; (dist.is_initialized(), os.environ['RANK'])"
        assert mesh.run(who).get(30).values() == [(False, "0"), (False, "1")]


@pytest.mark.slow
def test_a_lost_agent_is_started_again_with_its_ranks() -> None:
    hosts = start_hosts({"hosts": 2}, LocalLauncher(separate_hosts=True))
    with hosts.spawn_procs({"gpus": 2}, name="hosts", owns_hosts=True) as mesh:
        mesh.run("x = rank").get(30)
        agent = mesh._mesh.hosts[0].hello  # the one that keeps the store of the process groups
        assert agent is not None
        os.kill(agent.pid, signal.SIGKILL)
        await_dead(mesh, 0, 1)
        repaired = mesh.heal()
        assert repaired.ranks == (0, 1) and len(repaired.hosts) == 1
        assert mesh.run(SUM).get(60).values() == [4] * 4
        assert mesh.evaluate("globals().get('x')").get(30).values() == [None, None, 2, 3]
        assert mesh.run("import os; os.environ['GROUP_RANK']").get(30).values() == ["0", "0", "1", "1"]


def wait_for_file(path: str) -> int:
    while not os.path.exists(path):
        time.sleep(0.01)
    return int(os.environ["RANK"])


@pytest.mark.slow
def test_what_the_others_run_goes_on_while_the_first_host_is_healed(tmp_path: Path) -> None:
    hosts = start_hosts({"hosts": 2}, LocalLauncher(separate_hosts=True))
    with hosts.spawn_procs({"gpus": 2}, name="held", owns_hosts=True) as mesh:
        lost = mesh._mesh.hosts[0]  # it keeps the store of the process groups, so the others hear of its successor
        held = mesh.slice(hosts=1).execute(wait_for_file, str(tmp_path / "go on"))
        assert lost.hello is not None
        os.kill(lost.hello.pid, signal.SIGKILL)
        await_dead(mesh, 0, 1)
        healing = threading.Thread(target=mesh.heal)
        healing.start()
        wait_until(lambda: mesh._mesh.hosts[0] is not lost, 60)
        (tmp_path / "go on").touch()
        assert held.get(60).values() == [2, 3]
        healing.join(60)
        assert mesh.run(SUM).get(60).values() == [4] * 4


@pytest.mark.some("children_of")
@pytest.mark.slow
@pytest.mark.parametrize("find", [torch_templates_of, children_of])
def test_a_template_that_is_gone_is_started_again(
    mesh2: ProcMesh, mesh4: ProcMesh, find: Callable[[int, Container[int]], list[psutil.Process]]
) -> None:
    agent = mesh2._mesh.hosts[0].hello
    assert agent is not None
    workers = {status.pid for mesh in (mesh2, mesh4) for status in mesh.status()}
    templates = find(agent.pid, workers)
    assert templates
    for template in templates:
        template.kill()
    kill(mesh2, 1)
    assert mesh2.heal().ranks == (1,)
    assert mesh2.run(SUM).get(30).values() == [2, 2]


def test_a_rank_that_ends_again_and_again_is_not_started_for_ever(mesh2: ProcMesh) -> None:
    for _ in range(3):
        kill(mesh2, 1)
        mesh2.heal()
    mesh2.slice(gpus=1).run("print('about to end')").get(30)
    kill(mesh2, 1)
    often = "ended 4 times within 60 s and is not started again"
    with pytest.raises(
        errors.CrashLoopError, match=rf"rank 1 on .* {often}\n  the last time: killed by SIGKILL"
    ) as caught:
        heal_mesh(mesh2)
    assert isinstance(caught.value, DeviceMeshError) and "about to end" in str(caught.value)
    assert "mesh.respawn([1], force=True)" in str(caught.value)
    assert mesh2.slice(gpus=0).run("rank").get(30).values() == [0]
    mesh2.respawn(1, force=True)
    assert mesh2.run(SUM).get(30).values() == [2, 2]


def test_deaths_long_ago_do_not_count() -> None:
    loops, lost = CrashLoops(), {3: errors.WorkerLost(3, "a", "killed by SIGSEGV")}
    for at in (0.0, 1.0, 2.0, 3.0):
        loops.record(3, at)
    with pytest.raises(errors.CrashLoopError, match="ended 4 times"):
        loops.check(lost, 10.0)
    loops.check(lost, 61.0)
    loops.renumber({3: 2})
    loops.check(lost, 10.0)


def test_a_death_while_the_others_are_healed_is_healed_too(mesh4: ProcMesh) -> None:
    kill(mesh4, 1)
    victim = mesh4.status()[3].pid
    threading.Timer(0.05, os.kill, (victim, signal.SIGKILL)).start()
    mesh4.heal()
    await_dead_or_replaced(mesh4, victim)
    mesh4.heal()
    assert mesh4.run(SUM).get(30).values() == [4] * 4


def await_dead_or_replaced(mesh: ProcMesh, pid: int) -> None:
    wait_until(lambda: not any(status.pid == pid and status.state != "dead" for status in mesh.status()), 10)


def test_an_interrupt_leaves_a_mesh_that_can_be_healed(mesh4: ProcMesh) -> None:
    for rank, delay_s in ((0, 0.0), (1, 0.02), (3, 0.1)):
        kill(mesh4, rank)
        assert interrupt_heal(mesh4, delay_s) < 5
        mesh4.heal()
        assert mesh4.run(SUM).get(30).values() == [4] * 4


def interrupt_heal(mesh: ProcMesh, delay_s: float) -> float:
    """Heal, with an interrupt after ``delay_s``, or after the end on a quick machine; returns the seconds it took."""
    interrupt = threading.Timer(delay_s, signal.raise_signal, (signal.SIGINT,))
    started = ended = time.monotonic()
    try:
        interrupt.start()
        try:
            mesh.heal()
        finally:
            ended = time.monotonic()
            interrupt.join(10)
            time.sleep(0.2)
    except KeyboardInterrupt:
        pass
    return ended - started


def test_only_one_repairs_at_a_time(mesh2: ProcMesh) -> None:
    held = threading.Event()
    blocker = mesh2.slice(gpus=0).run("import time; time.sleep(3)")
    thread = threading.Thread(target=lambda: (held.set(), mesh2.respawn(1)))
    thread.start()
    held.wait(5)
    time.sleep(0.5)
    with pytest.raises(errors.UsageError, match='mesh "two" is repairing already'):
        mesh2.heal()
    assert mesh2.alive and mesh2.status()[0].state == "busy"
    thread.join(30)
    blocker.get(30)


def test_a_stopped_mesh_is_not_healed() -> None:
    mesh = this_host().spawn_procs({"gpus": 1}, name="short")
    mesh.stop()
    for part in (mesh, mesh.slice(gpus=0)):
        with pytest.raises(DeviceMeshError, match=r'mesh "short" was stopped\. Start another'):
            heal_mesh(part)


LEAVERS = """
from meshbook import DeviceMeshError, attach, detach, heal_mesh, shutdown, this_host
for leave in (shutdown, detach):
    mesh = this_host().spawn_procs({"gpus": 1}, torch=False)
    mesh.run("1").get(60)
    left = leave()
    for repair in (heal_mesh, lambda mesh: mesh.respawn(0)):
        try:
            repair(mesh)
        except DeviceMeshError as error:
            print(type(error).__name__)
    if left:
        attach(left[0])
        shutdown()
"""


@pytest.mark.slow
def test_a_mesh_that_its_process_has_left_is_not_healed_and_says_so() -> None:
    done = subprocess.run([sys.executable, "-c", LEAVERS], capture_output=True, text=True, timeout=120)
    assert done.stdout.splitlines() == ["MeshStoppedError"] * 2 + ["MeshDetachedError"] * 2, done.stderr


@pytest.mark.slow
def test_a_host_that_cannot_be_started_again_is_a_device_mesh_error_and_can_be_healed_later() -> None:
    launcher = MovedLauncher(separate_hosts=True)
    hosts = start_hosts({"hosts": 2}, launcher)
    with hosts.spawn_procs({"gpus": 1}, name="moved", owns_hosts=True, torch=False) as mesh:
        mesh.run("x = rank").get(60)
        agent = mesh._mesh.hosts[1].hello
        assert agent is not None
        os.kill(agent.pid, signal.SIGKILL)
        await_dead(mesh, 1)
        launcher.has_gone = True
        with pytest.raises(DeviceMeshError, match=r"the host agent could not be started: it has gone"):
            heal_mesh(mesh)
        assert mesh.last_repair is None
        launcher.has_gone = False
        assert heal_mesh(mesh) is mesh
        assert mesh.evaluate("globals().get('x')").get(60).values() == [0, None]


@pytest.mark.slow
def test_repairs_leave_no_process_and_no_descriptor(mesh2: ProcMesh) -> None:
    agent = mesh2._mesh.hosts[0].hello
    assert agent is not None
    mesh2.respawn(1)
    descriptors, children = open_descriptors(agent.pid), len(children_of(agent.pid, ()))
    recorded = []
    for _ in range(6):
        pid = mesh2.status()[1].pid
        recorded.append((pid, start_time(pid)))
        mesh2.respawn(1)
    wait_until(lambda: open_descriptors(agent.pid) <= descriptors and len(children_of(agent.pid, ())) <= children, 10)
    assert not any(started is not None and is_same_process(pid, started) for pid, started in recorded)


@pytest.mark.slow
def test_the_agent_of_this_host_is_shared_by_what_comes_after(mesh2: ProcMesh) -> None:
    agent = mesh2._mesh.hosts[0].hello
    assert agent is not None
    os.kill(agent.pid, signal.SIGKILL)
    await_dead(mesh2, 0, 1)
    mesh2.heal()
    with this_host().spawn_procs({"gpus": 1}) as other:
        assert other._mesh.hosts[0] is mesh2._mesh.hosts[0]
        assert mesh2.run(SUM).get(30).values() == [2, 2]


def open_descriptors(pid: int) -> int:
    return len(os.listdir(f"/proc/{pid}/fd"))


IGNORES_CHILDREN = """
import os, signal, sys, time
def ignore(when):
    if when == sys.argv[1]:
        signal.signal(signal.SIGCHLD, signal.SIG_IGN)
ignore("before")
import psutil
from meshbook import errors, this_host
procs = this_host().spawn_procs({"gpus": 2}, torch=False)
ignore("after")
assert procs.run("import subprocess; subprocess.run(['false']).returncode").get(60).values() == [1, 1]
os.kill(procs.status()[1].pid, signal.SIGKILL)
while not procs.lost:
    time.sleep(0.01)
assert procs.heal().ranks == (1,)
psutil.Process(procs.status()[0].pid).parent().kill()
try:
    procs.run("import time; time.sleep(600)").get(60)
except errors.WorkerLost as error:
    print(str(error).splitlines()[0])
assert procs.heal().ranks == (0, 1)
procs.stop()
"""


@pytest.mark.slow
@pytest.mark.parametrize(
    ("when", "how"),
    [("never", " (killed by SIGKILL, by kill -9 or the OOM killer)"), ("before", ""), ("after", "")],
    ids=["never", "before", "after"],
)
def test_a_program_that_ignores_the_ends_of_its_children_can_repair_its_meshes(when: str, how: str) -> None:
    command = [sys.executable, "-c", IGNORES_CHILDREN, when]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, timeout=120, check=True)
    name = socket.gethostname()
    assert done.stdout == f"ranks 0,1 on {name} ended: its host is lost: the host agent ended{how}\n"
