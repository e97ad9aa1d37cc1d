"""Calls that go past the agent keep the promises of those that go by it: order, once, told to the next controller."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import mail_ranks
import msgspec
import numpy as np
import pytest
from controllers import Zygote, alone
from patience import wait_until

from meshbook import ProcMesh, this_host
from meshbook.actor import Actor, endpoint
from meshbook.errors import CallFailed, CallTimeout, WorkerLost
from meshbook.shape.members import Piece
from meshbook.wire import messages as wire
from meshbook.wire.shortcuts import GROUPS_MAX_BYTES, OPEN_AFTER, RankShortcut, ShortcutServer, shortcut_path

LARGE = np.zeros(1 << 17, np.uint8)
"""It travels in shared memory, and so by the agent."""

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]


class Clerk(Actor):
    def __init__(self) -> None:
        self.notes: list[int] = []

    @endpoint
    def note(self, number: int, more: object = None) -> int:
        self.notes.append(number)
        return number

    @endpoint
    def read(self) -> list[int]:
        notes, self.notes = self.notes, []
        return notes

    @endpoint
    async def nap(self, seconds: float) -> str:
        time.sleep(seconds)
        return "rested"


NOTES: list[int] = []


def note(number: int, more: object = None) -> int:
    NOTES.append(number)
    return number


def read() -> list[int]:
    notes, NOTES[:] = list(NOTES), []
    return notes


def note_unevenly(number: int, more: object = None) -> int:
    """Some ranks answer a while after others."""
    time.sleep(0.002 * (number * os.getpid() % 5 == 0))
    return note(number, more)


def wait_on(waiting: int, path: str) -> int:
    rank: int = vars(sys.modules["__main__"])["rank"]
    if rank == waiting:
        wait_until(Path(path).exists)
    return rank


def fail_on(failing: int, seconds: float) -> None:
    if vars(sys.modules["__main__"])["rank"] == failing:
        raise RuntimeError(f"rank {failing} is asked to fail")
    time.sleep(seconds)


def came_past() -> tuple[int, int]:
    """The number of the last call that came past the agent to the main thread, and to mailboxes; 0: none is kept."""
    worker = mail_ranks.worker()
    lanes = worker.shortcut, worker.mail._shortcut
    numbers = [0 if lane._call is None else lane._call.shortcut for lane in lanes]
    return numbers[0], numbers[1]


def break_shortcut() -> None:
    """As user code does that closes what it has not opened."""
    os.close(mail_ranks.worker().shortcut.fd)


def die_at(path: str) -> None:
    Path(path).touch()
    os.kill(os.getpid(), signal.SIGKILL)


def warm(call: Callable[[int], object]) -> None:
    for number in range(2 * OPEN_AFTER):
        assert call(number) is not None


@pytest.fixture
def procs() -> Iterator[ProcMesh]:
    with this_host().spawn_procs({"gpus": 3}, group=False, torch=False) as mesh:
        warm(lambda number: mesh.slice(gpus=0).execute(note, number).get(30))
        assert mesh.slice(gpus=0).execute(read).get(30).values() == [list(range(2 * OPEN_AFTER))]
        yield mesh


@pytest.fixture
def clerks(procs: ProcMesh) -> Any:
    clerks: Any = procs.spawn("clerk", Clerk)
    first = clerks.slice(gpus=0)
    warm(lambda number: [first.note.call_one(number).get(30)])
    first.read.call_one().get(30)
    return clerks


def _agents_sleeps(mesh: ProcMesh) -> int:
    hello = mesh._mesh.hosts[0].hello
    assert hello is not None
    text = Path(f"/proc/{hello.pid}/status").read_text()
    return int(text.split("\nvoluntary_ctxt_switches:")[1].split()[0])


def _assert_agent_sleeps(mesh: ProcMesh, call: Callable[[], bool]) -> None:
    before, started = _agents_sleeps(mesh), time.monotonic()
    for _ in range(300):
        assert call()
    took_s = time.monotonic() - started
    assert _agents_sleeps(mesh) - before < 150 + 50 * took_s, f"in {took_s:.2f} s"


def test_calls_one_after_the_other_go_past_the_agent(procs: ProcMesh, clerks: Any) -> None:
    first, clerk = procs.slice(gpus=0), clerks.slice(gpus=0)
    for call in (lambda: first.execute(abs, -3).get(30).values() == [3], lambda: clerk.note.call_one(3).get(30) == 3):
        for _ in range(5):
            assert call()
        _assert_agent_sleeps(procs, call)


def test_sends_keep_their_order_when_they_change_their_way(procs: ProcMesh, clerks: Any) -> None:
    first, clerk = procs.slice(gpus=0), clerks.slice(gpus=0)
    futures = []
    for number in range(600):
        futures.append(
            procs.execute(note, number)
            if number % 41 == 7
            else first.execute(note, number, LARGE if number % 37 == 5 else None)
        )
        if number % 3 == 0 and number % 10:
            futures[-1].get(30)
    for future in futures:
        future.get(30)
    assert first.execute(read).get(30).values() == [list(range(600))]
    for number in range(600):
        if number % 41 == 7:
            clerks.note.broadcast(number)
        elif number % 5 == 1:
            clerk.note.broadcast(number, LARGE if number % 37 == 5 else None)
        elif number % 3:
            clerk.note.call_one(number).get(30)
        else:
            clerk.note.call_one(number)
    assert clerk.read.call_one().get(30) == list(range(600))


def test_calls_to_several_go_past_the_agent(procs: ProcMesh, clerks: Any) -> None:
    clerks.read.call().get(60)  # each rank has made its own
    for call in (lambda: procs.execute(abs, -3).get(30).values() == [3] * 3, lambda: len(clerks.note.call(3).get(30))):
        for _ in range(2 * OPEN_AFTER):
            assert call()
        _assert_agent_sleeps(procs, call)


def test_calls_to_several_keep_their_order(procs: ProcMesh, clerks: Any) -> None:
    warm(lambda number: procs.execute(note, number).get(30))
    warm(lambda number: clerks.note.call(number).get(30))
    procs.execute(read).get(30)
    clerks.read.call().get(30)
    parts = [[0, 1, 2], [0], [1, 2], [0, 2], [1]]
    sent: list[list[int]] = [[], [], []]
    futures: list[Any] = []
    for number in range(500):
        ranks = parts[number % 7 % 5]
        for rank in ranks:
            sent[rank].append(number)
        more = LARGE if number % 37 == 5 else None
        futures = [
            procs.slice(gpus=ranks).execute(note_unevenly, number, more),
            clerks.slice(gpus=ranks).note.call(number, more),
        ]
        if number % 5:
            for future in futures:
                assert future.get(30).values() == [number] * len(ranks)
    for future in futures:
        future.get(30)
    assert procs.execute(read).get(30).values() == sent
    assert clerks.read.call().get(30).values() == sent


def test_ranks_that_answer_a_call_of_several_before_others_can_be_called(procs: ProcMesh, tmp_path: Path) -> None:
    warm(lambda number: procs.execute(note, number).get(30))
    slow = procs.execute(wait_on, 1, str(tmp_path / "end"))
    for number in range(100):
        assert procs.slice(gpus=0).execute(abs, -number).get(30).values() == [number]
    assert not slow.done()
    (tmp_path / "end").touch()
    assert slow.get(30).values() == [0, 1, 2]


def test_a_rank_that_raises_ends_a_call_of_several(procs: ProcMesh) -> None:
    warm(lambda number: procs.execute(note, number).get(30))
    for seconds in (0.0, 0.05):
        with pytest.raises(CallFailed, match="rank 1 is asked to fail"):
            procs.execute(fail_on, 1, seconds).get(30)
        assert procs.execute(abs, -1).get(30).values() == [1] * 3
    assert sorted(len(value) for value in procs.execute(bytes, 100_000).get(30).values()) == [100_000] * 3
    procs.execute(read).get(30)
    procs.execute(note, 7).get(30)
    assert procs.execute(read).get(30).values() == [[7]] * 3


def test_calls_of_several_with_large_answers_go_by_the_agent(procs: ProcMesh, monkeypatch: pytest.MonkeyPatch) -> None:
    warm(lambda number: procs.execute(note, number).get(30))
    shortcuts = procs._controller._dispatcher.shortcuts
    sent: list[wire.Call] = []

    def send(data: bytes, address: str, go: Callable[[bytes, str], bool] = shortcuts._send) -> bool:
        message = wire.decode_past_agent(data)
        sent.extend([message] if isinstance(message, wire.Call) else [])
        return go(data, address)

    monkeypatch.setattr(shortcuts, "_send", send)
    for past in (3, 0, 0):
        assert procs.execute(bytes, 100_000).get(30).values() == [bytes(100_000)] * 3
        assert len(sent) == past
        sent.clear()
    assert procs.execute(abs, -1).get(30).values() == [1] * 3
    assert len(sent) == 3


def test_threads_that_call_at_once_get_their_own_answers(procs: ProcMesh, clerks: Any) -> None:
    clerk, first, wrong = clerks.slice(gpus=0), procs.slice(gpus=0), []

    def talk(base: int) -> None:
        for number in range(base, base + 150):
            if first.execute(abs, -number).get(60).values() != [number]:
                wrong.append(number)
            if clerk.note.call_one(number).get(60) != number:
                wrong.append(number)

    talking = [threading.Thread(target=talk, args=(1000 * each,)) for each in range(4)]
    for thread in talking:
        thread.start()
    for thread in talking:
        thread.join()
    assert not wrong
    noted = clerk.read.call_one().get(30)
    assert sorted(noted) == sorted(1000 * each + number for each in range(4) for number in range(150))
    for each in range(4):
        mine = [number for number in noted if number // 1000 == each]
        assert mine == sorted(mine)


def test_what_is_no_small_value_comes_by_the_agent(procs: ProcMesh) -> None:
    first = procs.slice(gpus=0)
    for size in (1, 10_000, 100_000, 1 << 20, 1):
        assert len(first.execute(bytes, size).get(30).values()[0]) == size
    with pytest.raises(CallFailed, match="invalid literal"):
        first.execute(int, "x").get(30)
    assert first.execute(abs, -1).get(30).values() == [1]


def test_a_call_that_takes_long_runs_once_and_can_be_cancelled(procs: ProcMesh, clerks: Any) -> None:
    first, clerk = procs.slice(gpus=0), clerks.slice(gpus=0)
    assert clerk.nap.call_one(0.1).get(30) == "rested"
    slow = first.execute(time.sleep, 0.05)
    with pytest.raises(CallTimeout):
        slow.get(0.01)
    slow.get(30)
    future = first.execute(time.sleep, 60)
    future.cancel()  # at once, on a lane that is quicker than what tells the agent of the call
    with pytest.raises(CallFailed, match="KeyboardInterrupt"):
        future.get(30)
    future = first.execute(time.sleep, 60)
    wait_until(lambda: "sleep" in str(procs.status()))
    future.cancel()
    with pytest.raises(CallFailed, match="KeyboardInterrupt"):
        future.get(30)
    warm(lambda number: first.execute(note, number).get(30))
    assert first.execute(read).get(30).values() == [list(range(2 * OPEN_AFTER))]


def test_a_death_ends_the_call_that_came_past_the_agent(procs: ProcMesh, tmp_path: Path) -> None:
    path = tmp_path / "began"
    with pytest.raises(WorkerLost):
        procs.slice(gpus=0).execute(die_at, str(path)).get(30)
    assert path.exists()
    procs.respawn(ranks=[0])
    warm(lambda number: procs.slice(gpus=0).execute(note, number).get(30))
    assert procs.slice(gpus=0).execute(read).get(30).values() == [list(range(2 * OPEN_AFTER))]


def answer_and_end() -> str:
    threading.Timer(0.05, os._exit, (0,)).start()
    return "answered"


def test_an_answer_past_the_agent_counts_before_what_the_agent_says_later(
    procs: ProcMesh, monkeypatch: pytest.MonkeyPatch
) -> None:
    first, controller = procs.slice(gpus=0), procs._controller
    warm(lambda number: first.execute(abs, -number).get(30))
    poll = controller._socket.poll

    def poll_before_it_came(wake_fd: int, timeout_s: float | None) -> bool:
        ended = poll(wake_fd, timeout_s)
        if controller._socket._unix.received:  # read after the wait had ended, as the answer came
            controller._socket.has_datagrams = False
        return ended

    monkeypatch.setattr(controller._socket, "poll", poll_before_it_came)
    future = first.execute(answer_and_end)
    controller.ask(lambda: time.sleep(1.0))  # meanwhile it answers and ends, and the agent has seen that
    assert future.get(30).values() == ["answered"]


def test_a_rank_that_closes_its_end_is_called_by_the_agent(procs: ProcMesh) -> None:
    first = procs.slice(gpus=0)
    first.execute(break_shortcut).get(30)
    for number in range(20):
        assert first.execute(note, number).get(30).values() == [number]
    assert first.execute(read).get(30).values() == [list(range(20))]


def test_an_answer_is_kept_until_it_was_heard(procs: ProcMesh, clerks: Any) -> None:
    wait_until(lambda: procs.slice(gpus=0).execute(came_past).get(30).values()[0][0] > 0)  # that very call
    clerks.slice(gpus=0).note.call_one(1).get(30)
    time.sleep(0.1)  # nothing comes for a moment
    wait_until(lambda: procs.slice(gpus=[0, 1]).execute(came_past).get(30).values()[0] == (0, 0))


# ---- a rank's end, without a rank -----------------------------------------------------------------------------------


@pytest.fixture
def ends(tmp_path: Path) -> Iterator[tuple[ShortcutServer, RankShortcut, list[Any]]]:
    path = shortcut_path(f"unix:{tmp_path}/control")
    told: list[Any] = []
    server = ShortcutServer(path)
    rank = RankShortcut(path, told.append, lambda fd: None, is_mail=False)
    with contextlib.closing(server), contextlib.closing(rank):
        yield server, rank, told


HERE = wire.Identity(1, "m", "here", "cpu", 1, 2, 1, 2, 0, 1, ("gpus",), (2,), 1)


def _call(id: int, number: int, **others: Any) -> wire.Call:
    return wire.Call(id, 1, "invoke", (Piece(1, (), ()),), shortcut=number, generation=0, **others)


def _open(server: ShortcutServer, rank: RankShortcut) -> str:
    for number in range(1, 1 + OPEN_AFTER):
        assert rank.is_news(_call(number, number), HERE)
    ((data, address),) = server.receive()
    assert wire.decode_past_agent(data) == wire.ShortcutOpened(1, 1, False)
    return address


def _reply(id: int) -> wire.Reply:
    return wire.Reply(id, wire.OK, 0.5, inline=b"value")


Ends = tuple[ShortcutServer, RankShortcut, list[Any]]


def test_a_rank_answers_once_and_tells_the_agent_when_it_must(ends: Ends) -> None:
    server, rank, told = ends
    address = _open(server, rank)
    assert server.send(wire.encode(_call(50, 50)), address)
    call = rank.take(HERE)
    assert call == _call(50, 50)
    assert rank.answer(call, _reply(50), 1, may_pass=True)
    ((data, _),) = server.receive()
    assert wire.decode_past_agent(data) == wire.Replies(50, (wire.RankReply(1, wire.OK, 0, 0.5, None, None, b"value"),))
    assert not told
    assert not rank.is_news(_call(50, 50), HERE)  # the agent brings it as well
    assert told == [_reply(50)]
    assert not rank.is_news(_call(50, 50), HERE)
    assert told.pop().status == wire.GONE


def test_what_a_rank_tells_of_its_groups_goes_with_its_answer_past_the_agent_unless_it_is_long(ends: Ends) -> None:
    server, rank, told = ends
    address = _open(server, rank)
    for id, groups in ((50, b"told"), (51, bytes(GROUPS_MAX_BYTES)), (52, bytes(1 + GROUPS_MAX_BYTES))):
        assert server.send(wire.encode(_call(id, id)), address)
        call = rank.take(HERE)
        assert call is not None
        reply = msgspec.structs.replace(_reply(id), inline=bytes(wire.INLINE_MAX_BYTES), groups=groups)
        may_pass = len(groups) <= GROUPS_MAX_BYTES
        assert rank.answer(call, reply, 1, may_pass=True) is may_pass
        came = [wire.decode_past_agent(data) for data, _ in server.receive()]
        assert [each.replies[0].groups for each in came if isinstance(each, wire.Replies)] == [groups] * may_pass
    assert told == [wire.CameEarly(_call(52, 52))]


def test_a_rank_tells_what_was_not_heard_when_the_controller_is_gone(ends: Ends) -> None:
    server, rank, told = ends
    address = _open(server, rank)
    server.send(wire.encode(_call(50, 50)), address)
    call = rank.take(HERE)
    assert call is not None
    rank.give_up()  # while it runs
    assert told == [wire.CameEarly(call), wire.ToldAll()]
    assert not rank.answer(call, _reply(50), 1, may_pass=True)
    told.clear()
    for id, is_heard in ((60, False), (61, True)):
        server.send(wire.encode(_call(id, id)), address)
        call = rank.take(HERE)
        assert call is not None
        assert rank.answer(call, _reply(id), 1, may_pass=True)
        server.send(wire.encode(wire.Heard(id if is_heard else id - 1)), address)
        assert rank.take(HERE) is None
        rank.give_up()
        assert told == [*(() if is_heard else (wire.CameEarly(call), _reply(id))), wire.ToldAll()]
        told.clear()
    server.send(wire.encode(_call(65, 65)), address)
    call = rank.take(HERE)
    assert call is not None
    rank.give_up()
    told.clear()
    assert not rank.is_news(call, HERE)  # the agent had heard of it from another rank, and has our word by now
    assert not told
    assert not rank.answer(call, _reply(65), 1, may_pass=True)
    server.send(wire.encode(_call(70, 70)), address)
    call = rank.take(HERE)
    assert call is not None
    server.close()
    assert not rank.answer(call, _reply(70), 1, may_pass=True)  # who has called is gone
    assert told == [wire.CameEarly(call)]


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"nonsense",
        wire.encode(wire.Heartbeat()),
        wire.encode(_call(50, 3)),  # an old one
        wire.encode(msgspec.structs.replace(_call(50, 50), mesh=2)),
        wire.encode(msgspec.structs.replace(_call(50, 50), generation=1)),
        wire.encode(msgspec.structs.replace(_call(50, 50), target=(Piece(0, (), ()),))),
    ],
)
def test_a_rank_takes_nothing_that_is_not_for_it(ends: Ends, data: bytes) -> None:
    server, rank, told = ends
    address = _open(server, rank)
    assert server.send(data, address)
    assert rank.take(HERE) is None
    assert server.send(wire.encode(_call(51, 51)), address)
    assert rank.take(HERE) == _call(51, 51)
    assert not told


def test_a_rank_tells_what_it_has_not_taken_yet_when_the_controller_is_gone(ends: Ends) -> None:
    server, rank, told = ends
    address = _open(server, rank)
    server.send(wire.encode(_call(50, 50)), address)
    call = rank.take(HERE)
    assert call is not None
    assert rank.answer(call, _reply(50), 1, may_pass=True)
    server.send(wire.encode(wire.Heard(50)), address)
    server.send(wire.encode(_call(60, 60)), address)
    rank.give_up()
    assert told == [wire.CameEarly(_call(60, 60)), wire.ToldAll()]
    told.clear()
    call = rank.take(HERE)
    assert call == _call(60, 60)
    assert not rank.answer(call, _reply(60), 1, may_pass=True)  # the agent is to have it, and knows the call
    assert not told


def test_nobody_but_the_controller_sends_to_a_rank(ends: Ends) -> None:
    server, rank, _ = ends
    address = _open(server, rank)
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as stranger, pytest.raises(PermissionError):
        stranger.sendto(wire.encode(_call(50, 50)), address)


def test_what_cannot_go_is_said(ends: Ends) -> None:
    server, rank, _ = ends
    address = _open(server, rank)
    assert not server.send(bytes(1 << 20), address)
    rank.close()
    assert not server.send(b"x", address)
    assert RankShortcut("", print, print, is_mail=False).is_news(_call(1, 1), HERE)


# ---- the next controller --------------------------------------------------------------------------------------------

SPAWN = f"""
import os, signal, time
mesh = this_host().spawn_procs({{"gpus": 2}}, name="kept", device="cpu", group=False, torch=False)
first = mesh.slice(gpus=0)
def sleep_and_say(number, seconds):
    import os, time
    time.sleep(seconds)
    os.environ["RAN"] = os.environ.get("RAN", "") + f" {{number}}"
    return number
for number in range({2 * OPEN_AFTER}):
    first.execute(abs, -number).get(30)
time.sleep(0.2)  # all of it is acknowledged
say("session", mesh.session)
def call(seconds):
    future = first.execute(sleep_and_say, 77, seconds)
    mesh._controller.ask(lambda: None)  # it is on its way
    return future
"""

SPREAD = """
shortcuts = mesh._controller._dispatcher.shortcuts
for number in range({often}):
    mesh.execute(abs, -number).get(30)
time.sleep(0.2)
def call(seconds, number=77):
    future = mesh.execute(sleep_and_say, number, seconds)
    mesh._controller.ask(lambda: None)
    return future
def die_after_one(kind):
    from meshbook.wire import messages
    send, is_sent = shortcuts._send, []
    def send_one(data, address):
        if type(messages.decode_past_agent(data)).__name__ == kind:
            if is_sent:
                os.kill(os.getpid(), signal.SIGKILL)
            is_sent.append(kind)
        return send(data, address)
    shortcuts._send = send_one
def sleep_unevenly(number):
    import __main__
    return sleep_and_say(number, 0.5 * __main__.rank)
def call_unevenly(seconds):
    mesh.execute(sleep_unevenly, 77)
    mesh._controller.ask(lambda: time.sleep(seconds))
"""

ATTACH = """
import json, os
kept = attach("kept")
say("results", json.dumps([call.future.get(30).values() for call in kept.calls]))
first = kept.mesh("kept").slice(gpus=0)
say("ran", first.execute(os.getenv, "RAN").get(30).values()[0])
say("more", json.dumps([first.execute(abs, -n).get(30).values()[0] for n in range(20)]))
"""


@pytest.fixture(scope="module")
def zygote() -> Iterator[Zygote]:
    with alone() as zygote:
        yield zygote


@pytest.mark.some()
@pytest.mark.quick("call(0.0).get(30); detach()-results6")
@pytest.mark.parametrize(
    ("last_words", "results"),
    [
        ("call(0.0)", [[77]]),
        ("call(0.7)", [[77]]),  # it ends while there is no controller
        ("call(0.05).get(30)", [[77]]),  # the agent knows of it
        ("call(0.0).get(30)", [[77]]),  # it has come, and the next controller is not sure
        ("call(0.0).get(30); time.sleep(0.5)", []),
        ("call(0.05).get(30); time.sleep(0.5)", []),
        ("call(0.0).get(30); detach()", []),
        ("call(0.7); detach()", [[77]]),
    ],
)
def test_the_next_controller_gets_what_was_not_heard(zygote: Zygote, last_words: str, results: Any) -> None:
    driver = zygote.start(f"{SPAWN}\n{last_words}\nos.kill(os.getpid(), signal.SIGKILL)\n")
    driver.expect("session")
    driver.wait()
    successor = zygote.start(ATTACH)
    assert successor.expect_json("results") == results
    assert successor.expect("ran") == "77"
    assert successor.expect_json("more") == list(range(20))
    successor.wait()


def test_the_next_controller_hears_of_a_call_that_a_rank_had_not_read(zygote: Zygote) -> None:
    driver = zygote.start(
        f"""{SPAWN}
pid = first.execute(os.getpid).get(30).values()[0]
say("pid", pid)
os.kill(pid, signal.SIGSTOP)
call(0.0)
os.kill(os.getpid(), signal.SIGKILL)
"""
    )
    pid = int(driver.expect("pid"))
    driver.wait()
    successor = zygote.start(f"say('attaches', 1)\n{ATTACH}")
    successor.expect("attaches")
    timer = threading.Timer(0.5, os.kill, (pid, signal.SIGCONT))  # the agent waits for it for 1 s
    timer.start()
    assert successor.expect_json("results") == [[77]]
    assert successor.expect("ran") == "77"
    assert successor.expect_json("more") == list(range(20))
    successor.wait()
    timer.join()


@pytest.mark.some()
@pytest.mark.quick("call(0.0).get(30); die_after_one('Call'); call(0.3, 78); time.sleep(9)-results9-77 78")
@pytest.mark.parametrize(
    ("last_words", "results", "ran"),
    [
        ("call(0.0)", [[77, 77]], "77"),
        ("call(0.7)", [[77, 77]], "77"),
        ("call(0.05).get(30); time.sleep(0.5)", [], "77"),
        ("call(0.0).get(30); time.sleep(0.5)", [], "77"),
        ("call(0.7); detach()", [[77, 77]], "77"),
        ("call_unevenly(0.002)", [[77, 77]], "77"),
        ("call_unevenly(0.0); time.sleep(0.05)", [[77, 77]], "77"),
        ("die_after_one('Call'); call(0.0); time.sleep(9)", [[77, 77]], "77"),
        ("die_after_one('Call'); call(0.3); time.sleep(9)", [[77, 77]], "77"),
        # the first rank has forgotten the answer that the other keeps:
        ("call(0.0).get(30); die_after_one('Call'); call(0.3, 78); time.sleep(9)", [[78, 78]], "77 78"),
        ("die_after_one('Heard'); call(0.0).get(30); time.sleep(9)", [], "77"),
    ],
)
def test_the_next_controller_gets_what_several_ranks_have_not_told(
    zygote: Zygote, last_words: str, results: Any, ran: str
) -> None:
    spread = SPREAD.replace("{often}", str(2 * OPEN_AFTER))
    driver = zygote.start(f"{SPAWN}\n{spread}\n{last_words}\nos.kill(os.getpid(), signal.SIGKILL)\n")
    driver.expect("session")
    driver.wait()
    successor = zygote.start(ATTACH)
    found = successor.expect_json("results")
    if (
        "get(30)" in last_words and found != results
    ):  # it took long: the agent knew it, and its answers were not heard of
        assert found[:1] == [[77, 77]]
        del found[0]
    assert found == results
    assert successor.expect("ran") == ran
    assert successor.expect_json("more") == list(range(20))
    successor.wait()
