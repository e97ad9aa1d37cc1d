"""Calls by direct links keep the promises of those that go by the agent: order, once, told to the next controller."""

from __future__ import annotations

import contextlib
import os
import signal
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
from meshbook.wire.direct import MAX_BYTES, DirectLink, DirectListener
from meshbook.worker.direct_calls import DIAL_AFTER, CalleeLink, CalleeLinks

OPEN_AFTER = DIAL_AFTER[True]
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


def kept() -> tuple[int, int]:
    """How many calls by the controller's links are kept, of the main thread and of mailboxes."""
    worker = mail_ranks.worker()
    counts = [
        sum(len(link.kept) for link in links._links.values() if link.caller is None)
        for links in (worker.direct, worker.mail.direct)
    ]
    return counts[0], counts[1]


def break_link() -> None:
    """As user code does that closes what it has not opened."""
    os.close(mail_ranks.worker().direct._links[0].fd)


def break_link_and_wait() -> str:
    """The same while other calls have come and were not read."""
    time.sleep(0.3)
    break_link()
    return "broken"


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


def test_an_answer_by_a_link_counts_before_what_the_agent_says_later(procs: ProcMesh) -> None:
    first, controller = procs.slice(gpus=0), procs._controller
    warm(lambda number: first.execute(abs, -number).get(30))
    future = first.execute(answer_and_end)
    controller.ask(lambda: time.sleep(1.0))  # meanwhile it answers and ends, and the agent has seen that
    assert future.get(30).values() == ["answered"]


def test_a_link_that_user_code_breaks_costs_nothing(procs: ProcMesh) -> None:
    first = procs.slice(gpus=0)
    assert first.execute(break_link_and_wait).get(30).values() == ["broken"]
    warm(lambda number: first.execute(note, number).get(30))
    assert first.execute(read).get(30).values() == [list(range(2 * OPEN_AFTER))]
    futures = [first.execute(break_link_and_wait), *(first.execute(note, number) for number in range(20))]
    assert [future.get(30).values()[0] for future in futures] == ["broken", *range(20)]
    assert first.execute(read).get(30).values() == [list(range(20))]


def test_an_answer_is_kept_until_it_was_heard(procs: ProcMesh, clerks: Any) -> None:
    wait_until(lambda: procs.slice(gpus=0).execute(kept).get(30).values()[0][0] > 0)  # that very call
    clerks.slice(gpus=0).note.call_one(1).get(30)
    time.sleep(0.1)  # nothing comes for a moment
    assert procs.slice(gpus=0).execute(kept).get(30).values() == [(1, 0)]


# ---- a rank's end, without a rank -----------------------------------------------------------------------------------


class Ends:
    """A caller without a controller, and the links of a rank without the rank."""

    def __init__(self, folder: Path) -> None:
        self.told: list[Any] = []
        self.callers: list[DirectLink] = []
        self.came: list[tuple[CalleeLink, wire.Call]] = []
        self.listener = DirectListener(str(folder / "direct"))
        self.rank = CalleeLinks(
            lambda: HERE, lambda message, payload: self.told.append(message),
            lambda link, call, frames: self.came.append((link, call)),  # type: ignore[arg-type]
            lambda fd, serve: None, lambda fd: None, is_mail=False,
        )  # fmt: skip
        self.rank.open(str(folder), controller_is_here=True)

    def connect(self) -> DirectLink:
        for number in range(OPEN_AFTER):
            self.rank.note(_call(number, 0))
        sock = self.listener.accept()
        assert sock is not None
        caller = DirectLink(sock)
        self.callers.append(caller)
        assert _received(caller) == [wire.DirectHello(1, 0, 1, os.getpid(), False)]
        return caller

    def send(self, caller: DirectLink, id: int) -> tuple[CalleeLink, wire.Call]:
        assert caller.send(wire.encode(_call(id, id)), _call(id, id))
        self.rank.serve_all()
        return self.came.pop()

    def close(self) -> None:
        self.rank.abandon()
        for caller in self.callers:
            caller.close()
        self.listener.close()


def _received(link: DirectLink) -> list[Any]:
    return [wire.decode_past_agent(header) for header, _ in iter(link.receive, None)]


@pytest.fixture
def ends(tmp_path: Path) -> Iterator[Ends]:
    with contextlib.closing(Ends(tmp_path)) as ends:
        yield ends


HERE = wire.Identity(1, "m", "here", "cpu", 1, 2, 1, 2, 0, 1, ("gpus",), (2,), 1)


def _call(id: int, number: int, **others: Any) -> wire.Call:
    return wire.Call(id, 1, "invoke", (Piece(1, (), ()),), direct=number, generation=0, **others)


def _reply(id: int) -> wire.Reply:
    return wire.Reply(id, wire.OK, 0.5, inline=b"value")


def test_a_rank_answers_by_the_link_or_tells_the_agent_of_the_call(ends: Ends) -> None:
    caller = ends.connect()
    link, _ = ends.send(caller, 50)
    ends.rank.answer(link, _reply(50), [b"frame"], may_pass=True)
    header, frames = next(iter(caller.receive, None))
    assert frames == [b"frame"]
    assert wire.decode_past_agent(header) == wire.Replies(
        50, (wire.RankReply(1, wire.OK, 1, 0.5, None, None, b"value"),)
    )
    assert list(link.kept) == [50]
    link, _ = ends.send(caller, 51)  # which says that the answer has come
    assert list(link.kept) == [51]
    assert not ends.told
    ends.rank.answer(link, _reply(51), (), may_pass=False)
    assert ends.told == [wire.CameEarly(_call(51, 51)), _reply(51)]
    ends.told.clear()
    link, _ = ends.send(caller, 52)
    ends.rank.answer(link, _reply(52), [bytes(MAX_BYTES)], may_pass=True)
    assert ends.told == [wire.CameEarly(_call(52, 52)), _reply(52)]
    assert not _received(caller)


def test_a_call_that_the_agent_passes_on_runs_once(ends: Ends) -> None:
    caller = ends.connect()
    link, call = ends.send(caller, 50)
    assert not ends.rank.is_news(call)
    ends.rank.answer(link, _reply(50), (), may_pass=True)
    assert not ends.rank.is_news(call)
    assert not ends.told
    assert len(_received(caller)) == 1
    assert caller.send(b"", None)
    ends.rank.serve_all()
    assert not ends.rank.is_news(call)  # its controller had the answer
    assert ends.told.pop().status == wire.GONE
    assert ends.rank.is_news(_call(60, 60))
    assert not ends.rank.is_news(_call(60, 60))


def test_a_rank_tells_what_was_not_heard_when_the_controller_is_gone(ends: Ends) -> None:
    caller = ends.connect()
    link, _ = ends.send(caller, 50)
    ends.rank.answer(link, _reply(50), (), may_pass=True)
    assert len(_received(caller)) == 1
    link, _ = ends.send(caller, 51)
    ends.rank.answer(link, _reply(51), (), may_pass=True)
    assert caller.send(wire.encode(_call(52, 52)), _call(52, 52))  # not read yet
    caller.close()
    ends.rank.tell()
    assert ends.told == [wire.CameEarly(_call(51, 51)), _reply(51), wire.CameEarly(_call(52, 52)), wire.ToldAll()]
    ends.told.clear()
    link, call = ends.came.pop()
    assert call == _call(52, 52)
    ends.rank.answer(link, _reply(52), (), may_pass=True)
    assert ends.told == [_reply(52)]  # the agent knows the call
    assert not ends.rank.is_news(_call(51, 51))  # which another rank has told as well
    assert len(ends.told) == 1


def test_calls_by_a_link_that_has_broken_come_once_more_and_run_once(ends: Ends) -> None:
    caller = ends.connect()
    link, _ = ends.send(caller, 50)
    ends.rank.answer(link, _reply(50), (), may_pass=True)
    link, _ = ends.send(caller, 51)
    link.is_open = False  # user code has closed it
    ends.rank.serve_all()
    again = {id: msgspec.structs.replace(_call(id, id), pid=os.getpid()) for id in (50, 51, 52)}
    assert [ends.rank.is_news(call) for call in again.values()] == [False, False, True]
    link, _ = ends.send(ends.connect(), 53)
    ends.told.clear()
    ends.rank.answer(link, _reply(53), (), may_pass=True)
    link.is_open = False
    assert not ends.rank.is_news(msgspec.structs.replace(_call(53, 53), pid=os.getpid()))
    assert ends.told == [wire.CameEarly(_call(53, 53)), _reply(53)]
    assert not ends.rank.is_news(msgspec.structs.replace(_call(60, 60), pid=1))  # another process had it
    assert ends.told.pop().status == wire.GONE


@pytest.mark.parametrize("data", [b"", b"short", bytes(9) + b"nonsense", bytes(9) + wire.encode(wire.Goodbye()),
                                  b"\x07" + bytes(8) + wire.encode(_call(50, 50))])  # fmt: skip
def test_a_rank_ends_a_link_by_which_nonsense_comes(ends: Ends, data: bytes) -> None:
    caller = ends.connect()
    link = ends.rank._links[0]
    caller._sock.send(data or b"x")
    ends.rank.serve_all()
    assert not link.is_open
    assert not ends.came
    assert not ends.told


def test_a_send_never_waits(ends: Ends) -> None:
    caller = ends.connect()
    sent = 0
    while caller.send(wire.encode(_call(100 + sent, 100 + sent)), _call(100 + sent, 100 + sent), [bytes(1000)]):
        sent += 1
    assert sent > 50
    ends.rank.serve_all()
    assert [call.id for _, call in ends.came] == [100 + number for number in range(sent)]
    assert caller.send(wire.encode(_call(9999, 9999)), _call(9999, 9999))


def test_two_ends_that_flood_each_other_do_not_wait(ends: Ends) -> None:
    caller = ends.connect()
    link = ends.rank._links[0]
    refused = 0
    for number in range(2000):
        refused += not caller.send(wire.encode(_call(number, number)), _call(number, number), [bytes(5000)])
        reply = wire.Replies(number, (wire.RankReply(1, wire.OK, 1, 0.5, None),))
        refused += not link.send(wire.encode(reply), reply, [bytes(5000)])
    assert refused > 3000
    assert len(_received(caller)) == caller.received - 1
    ends.rank.serve_all()
    assert len(ends.came) == link.received


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
for number in range({often}):
    mesh.execute(abs, -number).get(30)
time.sleep(0.2)
def call(seconds, number=77):
    future = mesh.execute(sleep_and_say, number, seconds)
    mesh._controller.ask(lambda: None)
    return future
def die_after_one(kind):
    from meshbook.wire.direct import DirectLink
    send, is_sent = DirectLink.send, []
    def send_one(link, header, message, payload=()):
        if (message is not None) is (kind == "Call"):
            if is_sent:
                os.kill(os.getpid(), signal.SIGKILL)
            is_sent.append(kind)
        return send(link, header, message, payload)
    DirectLink.send = send_one
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
