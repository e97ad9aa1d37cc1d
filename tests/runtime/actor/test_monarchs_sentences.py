"""What Monarch says of actors that are not there any more stands below our own words."""

from __future__ import annotations

import os
import signal
import time

import pytest

from meshbook import ProcMesh, this_host
from meshbook.actor import (
    Actor,
    ActorError,
    ActorLostError,
    ActorStoppedError,
    ProcsStoppedError,
    SupervisionError,
    endpoint,
)
from meshbook.errors import UsageError

pytestmark = pytest.mark.monarch


class Victim(Actor):
    @endpoint
    def end(self, number: int) -> None:
        if not number:
            os._exit(3)
        os.kill(os.getpid(), number)
        time.sleep(60)

    @endpoint
    def ping(self) -> str:
        return "pong"

    @endpoint
    def forward(self, other: Victim) -> str:
        return other.ping.call_one().get()

    @endpoint
    def hand_over(self, other: Victim) -> Victim:
        return other


ME = rf"<root>\.<{__name__}\.Victim victim\{{'gpus': %d/2\}}>"


@pytest.mark.parametrize(
    ("number", "cause"),
    [(0, "exit code 3"), (signal.SIGKILL, r"Killed\(sig=9\)"), (signal.SIGSEGV, r"Killed\(sig=11\)")],
)
def test_a_call_to_a_process_that_ends(number: int, cause: str) -> None:
    with this_host().spawn_procs({"gpus": 2}, torch=False) as procs:
        victim = procs.spawn("victim", Victim)
        with pytest.raises(ActorLostError) as raised:
            victim.slice(gpus=1).end.call_one(number).get(60)
        said = str(raised.value)
        assert said.startswith("rank 1 on "), "our own words come first"
        sentence = f"The actor {ME % 1} and all its descendants have failed:\n  the process .* failed: {cause}"
        raised.match(rf"(?s)spawn them again\nEndpoint call victim\.end\(\) failed, {sentence}")
        with pytest.raises(ActorLostError, match=rf"Endpoint call victim\.ping\(\) failed, {sentence}"):
            victim.ping.call().get(60)
        with pytest.raises(ActorLostError, match=rf"Endpoint call victim\.ping\(\) failed, {sentence}"):
            _ = [part.get(60) for part in victim.ping.stream()]
        other = procs.slice(gpus=0).spawn("other", Victim)
        with pytest.raises(ActorError, match=r"Endpoint call victim\.ping\(\) failed, The actor victim and all its"):
            other.forward.call_one(victim.slice(gpus=1)).get(60)


def test_calls_to_what_was_stopped(mesh2: ProcMesh) -> None:
    victim = mesh2.spawn("victim", Victim)
    assert victim.ping.call().get(60).values() == ["pong"] * 2
    other = mesh2.slice(gpus=0).spawn("other", Victim)
    sent = other.hand_over.call_one(victim).get(60)
    victim.stop("enough").get(60)
    stopped = (
        rf"\nEndpoint call victim\.ping\(\) failed, The actor {ME % 0} and all its descendants have stopped: enough"
    )
    with pytest.raises(ActorStoppedError, match=r'^the actors "victim" were stopped \(enough\)\. Spawn them') as raised:
        victim.ping.call()
    raised.match(stopped)
    with pytest.raises(SupervisionError, match=r"Endpoint call victim\.ping\(\) failed, The actor .*victim"):
        sent.ping.call().get(60)
    mesh2.stop().get()
    with pytest.raises(ProcsStoppedError, match=r"(?s)was stopped.*Endpoint call other\.ping\(\) failed, .*stopped"):
        other.ping.call()
    with pytest.raises(RuntimeError, match=r"(?s)was stopped.*`ProcMesh` has already been stopped"):
        mesh2.spawn("late", Victim)


def test_bindings_that_do_not_fit_the_processes() -> None:
    with pytest.raises(
        UsageError, match=r"(?s)a mapping for each.*proc_bind length \(1\) must equal procs_per_host \(4\)"
    ):
        this_host().spawn_procs({"gpus": 4}, proc_bind=[{"cpus": "0"}])
