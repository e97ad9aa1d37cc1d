"""What becomes of actors when their mesh of processes ends, or the process that drives it does."""

from __future__ import annotations

import gzip
import os
import signal
import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

import psutil
import pytest
from actor_classes import Cleaner, Counter, Endless, EndlessAsync, LastWords, Owner, Writer
from controllers import Zygote, alone
from patience import wait_until

from meshbook import ProcMesh, this_host
from meshbook.actor import ActorError, ActorStoppedError


@pytest.fixture
def procs() -> Iterator[ProcMesh]:
    with this_host().spawn_procs({"gpus": 2}, name="ends", group=False) as mesh:
        yield mesh


def test_actors_clean_up_when_their_processes_are_stopped(procs: ProcMesh, tmp_path: Path) -> None:
    cleaners = procs.spawn("cleaners", Cleaner, str(tmp_path / "async"))
    words = procs.spawn("words", LastWords, str(tmp_path / "plain"))
    busy = procs.spawn("busy", LastWords, str(tmp_path / "busy"))
    assert cleaners.ping.call().get(20).values() == ["pong"] * 2
    words.initialized.get(20)
    busy.initialized.get(20)
    busy.sleep.broadcast(60)
    busy.sleep.broadcast(60)
    time.sleep(0.2)
    procs.stop()
    assert (tmp_path / "async").read_text() == "cleaned\n" * 2
    assert (tmp_path / "plain").read_text() == "cleaned\n" * 2
    assert sorted((tmp_path / "busy").read_text().split()) == ["cleaned"] * 2 + ["interrupted"] * 2


def test_a_clean_up_that_hangs_or_raises_does_not_hold_up_the_end(procs: ProcMesh, tmp_path: Path) -> None:
    path = str(tmp_path / "words")
    for how in ("hangs", "raises", ""):
        procs.spawn(f"words {how}", LastWords, path, how).initialized.get(20)
    started = time.monotonic()
    procs.stop()
    assert time.monotonic() - started < 5
    assert Path(path).read_text() == "cleaned\n" * 2


def test_files_that_were_left_open_keep_what_was_written(procs: ProcMesh, tmp_path: Path) -> None:
    one = procs.slice(gpus=0)
    one.spawn("writer", Writer).write.call_one(str(tmp_path / "actor")).get(20)
    one.run(f"left = open({str(tmp_path / 'cell')!r}, 'w'); left.write('cell'); None").get(20)
    procs.stop()
    assert (tmp_path / "actor.txt").read_text() == "text"
    assert gzip.decompress((tmp_path / "actor.gz").read_bytes()) == b"packed"
    assert (tmp_path / "cell").read_text() == "cell"


# ---- stop ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("cls", [Endless, EndlessAsync])
def test_a_stop_interrupts_what_does_not_end_and_callers_are_told(procs: ProcMesh, cls: type[Endless]) -> None:
    endless = procs.spawn("endless", cls)
    assert endless.get.call().get(20).values() == [1, 1]
    running, waiting = endless.wait.call(), endless.get.call()
    endless.stop("enough").get(30)
    for call in (running, waiting):
        with pytest.raises(ActorStoppedError, match='the actors "endless" were stopped'):
            call.get(20)
    assert procs.spawn("next", Counter).add.call(1).get(20).values() == [1, 1]


def test_who_waits_for_an_explicit_response_is_told_of_the_stop(procs: ProcMesh) -> None:
    endless = procs.spawn("endless", Endless)
    promised = endless.promise.call()
    endless.stop().get(30)
    with pytest.raises(ActorStoppedError, match='the actors "endless" were stopped'):
        promised.get(20)


def test_a_stop_interrupts_a_constructor(procs: ProcMesh) -> None:
    endless = procs.spawn("endless", Endless, True)
    endless.stop().get(30)
    with pytest.raises(ActorStoppedError):
        endless.initialized.get(20)


def test_an_actor_that_heeds_no_interrupt_is_named(procs: ProcMesh) -> None:
    endless = procs.slice(gpus=1).spawn("endless", Endless)
    endless.get.call_one().get(20)
    endless.deaf.broadcast(60)
    with pytest.raises(ActorError, match=r'"endless" of rank 1 takes no more calls, .*actor_classes.py'):
        endless.stop().get(60)


# ---- what actors own -------------------------------------------------------------------------------------------------


@pytest.mark.quick("kill")
@pytest.mark.parametrize("how", ["stop", "procs", "kill"])
def test_what_an_actor_has_spawned_ends_with_it(
    procs: ProcMesh, tmp_path: Path, how: str, watch: Callable[[Iterable[psutil.Process]], None]
) -> None:
    path = tmp_path / "words"
    owner = procs.slice(gpus=0).spawn("owner", Owner)
    words, pids = owner.own.call_one(procs.slice(gpus=1), str(path)).get(60)
    words.initialized.get(20)
    watch(psutil.Process(pid) for pid in pids)
    if how == "stop":
        owner.stop().get(30)
        assert path.read_text() == "cleaned\n" * 3  # of two processes, and of the other rank
        with pytest.raises(ActorStoppedError):
            words.sleep.call(0).get(20)
        assert procs.lost == ()
    elif how == "procs":
        procs.stop()
        wait_until(lambda: path.exists() and path.read_text() == "cleaned\n" * 3)
    else:
        os.kill(procs.slice(gpus=0).evaluate("__import__('os').getpid()").get(20).values()[0], signal.SIGKILL)
        wait_until(lambda: path.exists() and path.read_text() == "cleaned\n" * 2)
    wait_until(lambda: not any(psutil.pid_exists(pid) for pid in pids))


# ---- the next process that drives them -------------------------------------------------------------------------------

FIRST = """
import pickle
from actor_classes import Counter, Relay
from meshbook import this_host
from meshbook.actor import Channel
procs = this_host().spawn_procs({"gpus": 2}, name="kept", device="cpu", group=False)
counters = procs.spawn("counters", Counter, 5)
relays = procs.spawn("relays", Relay)
port, receiver = Channel.open()
open(PATH, "wb").write(pickle.dumps((counters, relays, port)))
say("value", counters.add.call(1).get(30).values())
time.sleep(60)
"""

SECOND = """
import pickle, meshbook.actor
try:
    pickle.load(open(PATH, "rb"))[0].get.call().get(30)
except Exception as error:
    say("early", str(error))
kept = attach("kept")
counters, relays, port = pickle.load(open(PATH, "rb"))
say("value", counters.add.call(1).get(30).values())
seen = []
meshbook.actor.unhandled_fault_hook = seen.append
counters.slice(gpus=1).fail.broadcast()
while not seen:
    time.sleep(0.01)
say("fault", seen[0].what, seen[0].ranks)
import contextlib, io
told = io.StringIO()
with contextlib.redirect_stderr(told):
    relays.slice(gpus=0).send_many.call_one(port, 3).get(30)
    while "port" not in told.getvalue():
        time.sleep(0.01)
say("told", told.getvalue().replace(chr(10), "|"))
kept.mesh("kept").stop()
"""


@pytest.fixture
def zygote() -> Iterator[Zygote]:
    with alone() as zygote:
        yield zygote


def test_references_serve_the_next_kernel_and_what_is_lost_is_told(
    zygote: Zygote, tmp_path: Path, watch: Callable[[Iterable[psutil.Process]], None]
) -> None:
    path = f"import time\nPATH = {str(tmp_path / 'references')!r}\n"
    first = zygote.start(path + FIRST)
    assert first.expect("value") == "[6, 6]"
    watch(first.family())
    first.kill()
    second = zygote.start(path + SECOND)
    assert "which this process does not drive. Attach it: meshbook.attach(" in second.expect("early")
    assert second.expect("value") == "[7, 7]"
    assert second.expect("fault") == "counters.fail (1,)"
    told = second.expect("told")
    assert told.count("|") == 1 and told.startswith("rank 0 has sent to a port that a former process of this session")
    second.wait(60)
