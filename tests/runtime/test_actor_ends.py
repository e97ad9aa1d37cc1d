"""What becomes of actors when their mesh of processes ends, or the process that drives it does."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

import psutil
import pytest
from actor_classes import Cleaner, LastWords
from controllers import Zygote, alone

from meshbook import ProcMesh, this_host


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
