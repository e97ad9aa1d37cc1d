"""The mesh outlives its controller: killed, gone, replaced, expired. Controllers are processes of their own here."""

from __future__ import annotations

import contextlib
import importlib
import json
import os
import random
import signal
import statistics
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

import psutil
import pytest
from controllers import Driver, Zygote
from patience import wait_until

import meshbook
from meshbook import SavedSession, sessions
from meshbook.controller.controller import Controller
from meshbook.controller.reattach import Reattach
from meshbook.mesh.driven import ATTACH_TIMEOUT_S
from meshbook.sessions.folder import take_lock

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]

attach_module = importlib.import_module("meshbook.mesh.attach")

Watch = Callable[[Iterable[psutil.Process]], None]

START_CELL = "from meshbook.mesh.rank_calls import start_cell\n"

SPAWN = """
mesh = this_host().spawn_procs({"gpus": 2}, name="kept", device="cpu")
mesh.run("n = 0; state = rank + 40").get(120)
say("session", mesh.session)
wait()
"""

COUNT = "import time; print('go'); time.sleep(0.6); n += 1; print('count', n); n"


@pytest.fixture(scope="module")
def zygote() -> Iterator[Zygote]:
    """Drivers, and a place for sessions where there are none but ours."""
    with tempfile.TemporaryDirectory(prefix="mb") as folder, pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_RUNTIME_DIR", folder)
        patch.setenv("MESHBOOK_LEASE_S", "60")
        zygote = Zygote()
        yield zygote
        zygote.close()
        sessions_folder, deadline = Path(folder) / f"meshbook-{os.getuid()}", time.monotonic() + 20
        while left := list(sessions_folder.iterdir()):
            assert time.monotonic() < deadline, left
            time.sleep(0.1)


@pytest.fixture(autouse=True)
def nothing_is_left(zygote: Zygote) -> Iterator[None]:
    """Whatever a test has left behind is ended, so that the next one finds no session."""
    yield
    for driver in zygote.drivers:
        driver.close()
    zygote.drivers.clear()
    for session in sessions():
        with contextlib.suppress(meshbook.errors.AttachError):
            meshbook.attach(session)
    meshbook.shutdown()


def _the_session() -> SavedSession:
    (session,) = sessions()
    return session


def _gone(processes: list[psutil.Process], timeout_s: float) -> bool:
    return not [process for process in psutil.wait_procs(processes, timeout=timeout_s)[1] if process.is_running()]


def _start(zygote: Zygote, watch: Watch, code: str) -> tuple[Driver, list[psutil.Process]]:
    """A driver that has spawned its mesh and now runs ``code``, and the mesh's processes."""
    driver = zygote.start(SPAWN + code)
    driver.expect("session")
    family = driver.family()
    assert len(family) >= 4
    watch(family)
    driver.tell()
    return driver, family


ROUND = """
import json
kept = attach("kept")
say("took", kept.took_s)
mesh = kept.mesh("kept")
texts = []
for call in kept.calls:
    call.listen(lambda event: texts.append(event.text) if hasattr(event, "text") and event.rank == 0 else None)
say("results", json.dumps([call.future.get(30).values() for call in kept.calls]))
say("texts", json.dumps("".join(texts)))
"""

CALL = f"""
from meshbook.mesh.rank_calls import start_cell
run = start_cell(mesh, {COUNT!r}, on_output=lambda event: say("running"))
time.sleep(60)
"""


def test_killed_in_the_midst_of_calls_twenty_times_each_result_comes_once(zygote: Zygote, watch: Watch) -> None:
    driver, family = _start(zygote, watch, CALL)
    took, results, texts = [], [], ""
    chance = random.Random(3)
    for count in range(20):
        driver.expect("running")
        time.sleep(chance.uniform(0.0, 0.2))
        driver.kill()
        driver = zygote.start(ROUND + (CALL if count < 19 else "say('state', mesh.run('(n, state)').get(30).values())"))
        took.append(float(driver.expect("took")))
        results += driver.expect_json("results")
        texts += driver.expect_json("texts")
    assert results == [[number, number] for number in range(1, 21)]
    counts = [line for line in texts.splitlines() if line.startswith("count")]
    assert counts == [f"count {number}" for number in range(1, 21)]
    assert driver.expect("state") == "[(20, 40), (20, 41)]"
    assert statistics.median(took) < 5
    driver.wait()
    assert _gone(family, 10)
    assert sessions() == []


WORK = """
import pathlib, time
for step in range(40):
    while step == 20 and not pathlib.Path({folder!r}, "detached").exists():
        time.sleep(0.02)
    t = torch.ones(1); dist.all_reduce(t); print("step", step, int(t)); time.sleep(0.02)
n = step
pathlib.Path({folder!r}, f"ended-{{rank}}").touch()
n
"""


def test_collectives_output_and_results_go_on_while_detached(zygote: Zygote, watch: Watch, tmp_path: Path) -> None:
    code = f"""
from meshbook.mesh.rank_calls import start_cell
run = start_cell(mesh, {WORK.format(folder=str(tmp_path))!r}, on_output=lambda event: say("event", event))
later = mesh.execute(lambda: 7)
wait()
detach(lease_s=90)
say("left", [mesh.alive, sessions()[0].owner_pid, sessions()[0].lease_s])
try:
    mesh.run("1")
except meshbook.MeshError as error:
    say("error", error)
try:
    run.future.get(1)
except meshbook.MeshError as error:
    say("error", error)
mesh.stop()
"""
    driver, family = _start(zygote, watch, code)
    driver.expect("event")
    driver.tell()
    assert driver.expect("left") == "[False, None, 90.0]"
    session = _the_session()
    told = f'mesh "kept" was detached. Attach it again: meshbook.attach("{session.id}").'
    assert [driver.expect("error"), driver.expect("error")] == [told, told]
    driver.wait()
    (tmp_path / "detached").touch()
    wait_until(lambda: len(list(tmp_path.glob("ended-*"))) == 2, 60)
    assert all(process.is_running() for process in family)
    before = [line for line in driver.heard if line.startswith("event StreamText(rank=0")]
    driver = zygote.start(
        """
kept = attach("kept")
cell, later = kept.calls
cell.listen(lambda event: say("event", event))
say("values", [cell.what, cell.future.get(30).values(), later.what, later.future.get(30).values()])
say("ranks", cell.ranks, cell.waiting, sorted(cell.durations_s))
"""
    )
    assert driver.expect("values") == "['the cell', [39, 39], '<lambda>', [7, 7]]"
    assert driver.expect("ranks") == "(0, 1) () [0, 1]"
    after = [line for line in driver.heard if line.startswith("event StreamText(rank=0")]
    steps = "".join(eval(line.partition("text=")[2].rpartition(", output")[0]) for line in before + after)
    assert steps == "".join(f"step {step} 2\n" for step in range(40))
    driver.wait()


def test_meshes_end_with_their_lease_and_leave_nothing(zygote: Zygote, watch: Watch) -> None:
    driver, family = _start(zygote, watch, "mesh.push({'big': bytearray(1 << 22)}).get(30)\ndetach(lease_s=1.5)")
    session = _the_session()
    assert (session.path / "state").stat().st_mode & 0o777 == 0o600
    driver.wait()
    assert _gone(family, 12)
    assert not session.path.exists()
    with pytest.raises(meshbook.errors.AttachError, match=r"session \w+ has ended\. Start another: this_host\(\)"):
        meshbook.attach(session)


def test_an_agent_without_meshes_does_not_wait(zygote: Zygote, watch: Watch) -> None:
    driver, family = _start(zygote, watch, "mesh.stop(); say('stopped'); time.sleep(60)")
    driver.expect("stopped")
    driver.kill()
    assert _gone(family, 15)


def test_a_living_controller_keeps_its_meshes(zygote: Zygote, watch: Watch) -> None:
    driver, _ = _start(zygote, watch, "wait()")
    session = _the_session()
    assert (session.owner_pid, session.is_ours) == (driver.pid, False)
    with pytest.raises(meshbook.errors.SessionInUse) as caught:
        meshbook.attach("kept")
    assert str(caught.value) == (
        f"session {session.id} is driven by process {driver.pid}. "
        "Detach it there (meshbook.detach()) or end that process, then attach again."
    )
    with pytest.raises(meshbook.errors.AttachError, match='there is no session or mesh "kep" here'):
        meshbook.attach("kep")
    driver.tell()
    driver.wait()


def test_of_many_that_attach_at_once_one_wins(zygote: Zygote, watch: Watch) -> None:
    driver, _ = _start(zygote, watch, "time.sleep(60)")
    driver.kill()
    code = """
wait()
try:
    kept = attach("kept")
    say("won", kept.meshes[0].run("state").get(30).values())
    wait()
except meshbook.errors.SessionInUse as error:
    say("lost", error.owner_pid)
"""
    for _ in range(3):
        rivals = [zygote.start(code) for _ in range(4)]
        for rival in rivals:
            rival.tell()
        said = {rival.pid: rival.expect("") for rival in rivals}
        (winner,) = [pid for pid, words in said.items() if words.startswith("won")]
        assert said.pop(winner) == "won [40, 41]"
        assert set(said.values()) == {f"lost {winner}"}
        next(rival for rival in rivals if rival.pid == winner).kill()


ON_HOSTS = """
from meshbook import LocalLauncher, start_hosts
mesh = start_hosts({"hosts": 2}, LocalLauncher(separate_hosts=True)).spawn_procs({"gpus": 1}, name="kept")
say("session", mesh.session)
mesh.run('''
import time
def work():
    for step in range(60):
        dist.barrier(); time.sleep(0.02)
    return torch.full((300_000,), float(rank))
''').get(120)
first = mesh.evaluate("work()")
quick = mesh.slice(hosts=1).execute(lambda: 5)
time.sleep(0.3)
say("running", [host.hello.pid for host in mesh._mesh.hosts])
time.sleep(60)
"""


def test_hosts_over_tcp_are_found_again_and_share_their_store(zygote: Zygote, watch: Watch) -> None:
    driver = zygote.start(ON_HOSTS)
    agents = driver.expect_json("running")
    family = driver.family()
    watch(family)
    driver.kill()
    driver = zygote.start(
        """
kept = attach("kept")
say("took", kept.took_s)
big, quick = [call.future.get(120) for call in kept.calls]
say("big", [(len(value), value[0].item()) for value in big.values()])
say("quick", quick.values())
say("new", kept.meshes[0].run("g = dist.new_group(); t = torch.ones(1); dist.all_reduce(t, group=g); int(t)").get(120))
wait()
"""
    )
    assert float(driver.expect("took")) < ATTACH_TIMEOUT_S  # nobody was waited for in vain
    assert driver.expect("big") == "[(300000, 0.0), (300000, 1.0)]"
    assert driver.expect("quick").startswith("[5]")
    driver.expect("new")
    driver.kill()
    os.kill(agents[1], signal.SIGKILL)
    attachment = meshbook.attach("kept")
    assert [line.partition(": ")[2] for line in attachment.lost_hosts] == [
        f"the host agent (process {agents[1]}) has ended"
    ]
    mesh = attachment.mesh("kept")
    assert [status.state for status in mesh.status()].count("dead") == 1
    with pytest.raises(meshbook.errors.WorkerLost, match="its host is lost: the host agent"):
        mesh.run("1").get(10)
    meshbook.shutdown()
    assert _gone(family, 10)


def test_ranks_and_hosts_that_ended_meanwhile_are_told(zygote: Zygote, watch: Watch) -> None:
    driver, family = _start(zygote, watch, "mesh.run('import time; time.sleep(1)'); time.sleep(0.2); say('go'); wait()")
    driver.expect("go")
    driver.kill()
    kept = meshbook.attach("kept")
    mesh = kept.mesh("kept")
    pid = mesh.status()[1].pid
    assert pid in [process.pid for process in family]
    session = meshbook.detach(60)
    os.kill(pid, signal.SIGKILL)
    time.sleep(0.2)
    (again,) = (meshbook.attach(session[0]),)
    with pytest.raises(meshbook.errors.WorkerLost, match=r"rank 1 on .* killed by SIGKILL"):
        again.mesh("kept").run("1").get(10)
    assert again.mesh("kept").slice(gpus=0).run("state").get(10).values() == [40]
    assert again.lost_hosts == []


def test_what_is_printed_unheard_is_bounded_and_counted(zygote: Zygote, watch: Watch) -> None:
    lines, size = 60_000, 50
    cell = f"for i in range({lines}): print(f'{{i:>{size - 1}}}')"
    driver, _ = _start(
        zygote, watch, f"{START_CELL}start_cell(mesh, {cell!r}, on_output=lambda event: None); detach(60)"
    )
    driver.wait()
    (call,) = meshbook.attach("kept").calls
    events: list[object] = []
    call.listen(events.append)
    call.future.get(30)
    shown = sum(len(event.text) for event in events if hasattr(event, "text") and event.rank == 0)
    cuts = [event for event in events if hasattr(event, "log_path") and event.rank == 0]
    heard_before = lines * size - shown - (cuts[-1].size_bytes if cuts else 0)
    assert cuts
    assert 0 <= heard_before < 1 << 20  # what its first controller had
    assert Path(cuts[-1].log_path).read_text().count("\n") >= lines


def test_large_results_wait_in_shared_memory_and_are_freed(zygote: Zygote, watch: Watch) -> None:
    code = """
mesh.run("import time; big = torch.arange(2_000_000)").get(30)
kept = mesh.pull("big").get(30)
for _ in range(3):
    mesh.evaluate("time.sleep(0.3) or big")
time.sleep(0.2)
say("called")
os.kill(os.getpid(), 9)
"""
    driver, _ = _start(zygote, watch, code)
    driver.expect("called")
    driver.wait()
    attachment = meshbook.attach("kept")
    mesh = attachment.mesh("kept")
    for call in attachment.calls:
        assert [int(value.sum()) for value in call.future.get(30).values()] == [1999999000000] * 2
    assert len(attachment.calls) == 3
    attachment.calls.clear()
    del call
    in_use = "[len(o.in_use) for o in gc.get_objects() if type(o).__name__ == 'SegmentPool']"
    deadline = time.monotonic() + 30  # also what the dead controller had been lent is freed
    while (left := mesh.run(f"import gc; {in_use}").get(30).values()) != [[0], [0]]:
        assert time.monotonic() < deadline, left
        time.sleep(0.1)


def test_the_first_process_remembers_for_the_next(zygote: Zygote, watch: Watch) -> None:
    driver, _ = _start(zygote, watch, "meshbook.remember('notebook', b'a.ipynb'); say('said'); detach()")
    driver.wait()
    assert _the_session().recall("notebook") == b"a.ipynb"
    assert _the_session().recall("../state") is None
    attachment = meshbook.attach(_the_session())
    attachment.controller.folder.remember("notebook", b"b.ipynb")
    assert meshbook.recall("notebook") == b"b.ipynb"
    assert attachment.recall("other") is None
    with pytest.raises(meshbook.errors.UsageError, match="cannot name what is remembered"):
        meshbook.remember("../owner", b"")
    mine = meshbook.this_host().spawn_procs({"gpus": 1}, name="mine")
    assert mine.session == attachment.session
    assert mine.run("rank").get(30).values() == [0]


def test_two_sessions_in_one_process(zygote: Zygote, watch: Watch) -> None:
    driver, family = _start(zygote, watch, "detach()")
    driver.wait()
    with meshbook.this_host().spawn_procs({"gpus": 1}, name="mine") as mine:
        kept = meshbook.attach("kept").mesh("kept")
        assert kept.session != mine.session
        assert kept.run("state").get(30).values() == [40, 41]
        assert mine.run("rank").get(30).values() == [0]
        assert {session.is_ours for session in sessions()} == {True}
        with pytest.raises(meshbook.errors.SessionInUse):
            meshbook.attach("kept")
    meshbook.shutdown()
    assert _gone(family, 5)


def test_frames_of_a_former_controller_are_ignored_and_it_is_told(zygote: Zygote, watch: Watch) -> None:
    from meshbook.wire import messages as wire
    from meshbook.wire.connection import Connection

    driver, _ = _start(zygote, watch, "detach()")
    driver.wait()
    attachment = meshbook.attach("kept")
    controller, mesh = attachment.controller, attachment.mesh("kept")
    (host,) = mesh._mesh.hosts
    former = Connection(1)
    for _ in range(3):
        former.send(wire.encode(wire.Goodbye()), urgent=True)
    for frames in former.frames_to_send():
        controller.ask(lambda frames=frames: controller._socket.send(host.id, frames))  # type: ignore[misc]
    assert mesh.run("state").get(30).values() == [40, 41]
    newer = [bytes(frame) for frame in Connection(controller.epoch + 1).beat()]
    controller.ask(lambda: controller._dispatcher.on_frames(host.id, newer))
    with pytest.raises(meshbook.errors.WorkerLost, match="another controller has taken over its meshes"):
        mesh.run("1").get(10)


def test_dead_sessions_are_swept_and_waiting_ones_are_not(zygote: Zygote, watch: Watch) -> None:
    from meshbook.sessions.folder import read_state
    from meshbook.sessions.listing import sweep
    from meshbook.system.processes import process_state

    driver, family = _start(zygote, watch, "detach(lease_s=30)")
    driver.wait()
    session = _the_session()
    sweep()
    assert _the_session() == session or _the_session().id == session.id
    state = read_state(session.path)
    assert state is not None
    (host,) = state.hosts.values()
    state_file = session.path / "state"
    data = json.loads(state_file.read_bytes())
    data["left_at"] = -1e6
    state_file.write_bytes(json.dumps(data).encode())
    sweep()
    assert _the_session().id == session.id and not _gone(family, 0.5)  # an agent that is late lives
    os.kill(host.pid, signal.SIGSTOP)  # one that cannot notice that its lease is over
    wait_until(lambda: process_state(host.pid) == "T")
    sweep()
    assert not session.path.exists()
    assert _gone(family, 10)


def test_a_fork_does_not_give_the_session_up(zygote: Zygote, watch: Watch) -> None:
    driver, _ = _start(
        zygote, watch, "pid = os.fork()\nif pid == 0: os._exit(0)\nos.waitpid(pid, 0); say('forked'); wait()"
    )
    driver.expect("forked")
    session = _the_session()
    assert not take_lock(session.path)
    assert session.owner_pid == driver.pid
    driver.tell()
    driver.wait()


def test_ranks_take_the_words_of_whoever_attaches_them(zygote: Zygote, watch: Watch) -> None:
    words = "from meshbook.errors.advice import Advice, set_advice\nset_advice(Advice(stop=':stop'))\n"
    driver = zygote.start(words + SPAWN)
    driver.expect("session")
    watch(driver.family())
    driver.kill()
    kept = meshbook.attach("kept").mesh("kept")
    with pytest.raises(meshbook.errors.CallFailed, match=r"End the ranks with: mesh\.stop\(\)"):
        kept.run("import sys; sys.exit()").get(60)


def test_hosts_that_dial_before_the_next_controller_looks_for_them_are_let_in(
    zygote: Zygote, monkeypatch: pytest.MonkeyPatch
) -> None:
    """ZeroMQ gives up for good where a key is refused."""
    driver = zygote.start(
        "from meshbook import LocalLauncher, start_hosts\n"
        "hosts = start_hosts({'hosts': 2}, LocalLauncher(separate_hosts=True))\n"
        "mesh = hosts.spawn_procs({'gpus': 1}, name='kept', torch=False)\n"
        "say('ready')\n"
        "wait()\n"
    )
    driver.expect("ready")
    driver.kill()
    knock = attach_module._knock
    rejected: list[int] = []

    def slowly(controller: Controller, deadline: float) -> Reattach:
        seen = time.monotonic() + 2.0  # agents dial twice a second
        while not controller._socket.rejected and time.monotonic() < seen:
            time.sleep(0.01)
        rejected.append(controller._socket.rejected)
        return knock(controller, deadline)

    monkeypatch.setattr(attach_module, "_knock", slowly)
    attached = meshbook.attach("kept", timeout_s=30)
    assert rejected == [0] and attached.lost_hosts == []
    assert attached.mesh("kept").run("rank").get(60).values() == [0, 1]
