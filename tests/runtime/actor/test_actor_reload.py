"""A class that was defined again is taken over by living actors."""

from __future__ import annotations

import sys
import time
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from meshbook import ProcMesh
from meshbook.actor import Actor, ActorError, ReloadError, endpoint
from meshbook.errors import UsageError


class Base(Actor):
    """Defined in this file, which no rank imports: its classes travel by value, as those of a notebook."""

    def __init__(self, value: int) -> None:
        self.value = value

    @endpoint
    def get(self) -> int:
        return self.value


def one_class() -> Any:
    class Tally(Actor):
        def __init__(self, value: int) -> None:
            self.value = value

        @endpoint
        def step(self, by: int) -> int:
            self.value += by
            return self.value

        @endpoint
        def nap(self, seconds: float) -> None:
            time.sleep(seconds)

    return Tally


def another_class() -> Any:
    class Tally(Actor):
        def __init__(self, value: int, unit: str) -> None:
            self.value, self.unit = value, unit

        @endpoint
        def step(self, by: int) -> int:
            self.value -= by
            return self.value

        @endpoint
        def double(self) -> int:
            return self.value * 2

    return Tally


def test_actors_keep_their_state_and_get_the_new_methods(mesh4: ProcMesh) -> None:
    tallies = mesh4.spawn("tallies", one_class(), 10)
    row = tallies.slice(gpus=2)
    assert tallies.step.call(5).get(20).values() == [15] * 4
    before = row.step.call_one(1)
    tallies.reload(another_class(), timeout=20)
    assert before.get(20) == 16
    assert tallies.step.call(5).get(20).values() == [10, 10, 11, 10]
    assert row.double.call_one().get(20) == 22
    with pytest.raises(AttributeError, match="has no endpoint nap; it has: double, step"):
        tallies.nap.call(1)


def test_the_newest_class_of_the_name_is_taken(mesh2: ProcMesh, monkeypatch: pytest.MonkeyPatch) -> None:
    first, second = one_class(), another_class()
    first.__qualname__ = second.__qualname__ = "Tally"
    tallies = mesh2.spawn("tallies", first, 1)
    with pytest.raises(UsageError, match="no class Tally in the notebook"):
        tallies.reload()
    monkeypatch.setattr(sys.modules["__main__"], "Tally", second, raising=False)
    tallies.reload(timeout=20)
    assert tallies.double.call().get(20).values() == [2, 2]


def test_a_class_that_does_not_fit_is_refused_and_the_old_one_stays(mesh2: ProcMesh) -> None:
    tallies = mesh2.spawn("tallies", one_class(), 1)

    class Slotted(Actor):
        __slots__ = ("value",)

        @endpoint
        def step(self, by: int) -> int:
            return by

    class Derived(Base):
        pass

    class Waiting(Actor):
        @endpoint
        async def step(self, by: int) -> int:
            return by

    for cls, why in (
        (Slotted, "has other __slots__ now"),
        (Derived, r"derives from Base now, and the living actors from Actor"),
        (Waiting, "async endpoints now, and the living actors have no event loop"),
    ):
        with pytest.raises(ReloadError, match=f"ranks 0,1: .*{why}") as refused:
            tallies.reload(cls, timeout=20)
        assert "tallies.stop(), and spawn them again" in str(refused.value)
    assert tallies.step.call(1).get(20).values() == [2, 2]


def test_endpoints_with_calls_that_wait_do_not_vanish(mesh2: ProcMesh) -> None:
    class Other(Actor):
        @endpoint
        def call_nap(self, target: Any) -> None:
            target.nap.broadcast(0.0)

    tallies = mesh2.spawn("tallies", one_class(), 1)
    other = mesh2.slice(gpus=0).spawn("other", Other)
    tallies.nap.broadcast(2.0)
    with ThreadPoolExecutor(1) as pool:
        reloaded = pool.submit(tallies.reload, another_class(), timeout=20)
        time.sleep(0.5)
        other.call_nap.call_one(tallies).get(20)  # comes behind the class
        with pytest.raises(ReloadError, match=r"calls of nap wait, which .*Tally does not have any more"):
            reloaded.result()
    assert tallies.nap.call(0.0).get(20).values() == [None, None]


def test_actors_that_could_not_be_made_say_why(mesh2: ProcMesh) -> None:
    class Broken(Actor):
        def __init__(self) -> None:
            raise RuntimeError("no such shard")

    broken = mesh2.spawn("broken", Broken)
    with pytest.raises(ActorError, match="no such shard"):
        broken.reload(one_class(), timeout=20)


def test_actors_with_a_loop_are_reloaded_too(mesh2: ProcMesh) -> None:
    def make(sign: int) -> Any:
        class Pulse(Actor):
            def __init__(self) -> None:
                self.count = 0

            @endpoint
            async def beat(self) -> int:
                self.count += sign
                return self.count

        return Pulse

    pulses = mesh2.spawn("pulses", make(1))
    pulses.beat.call().get(20)
    pulses.reload(make(-1), timeout=20)
    assert pulses.beat.call().get(20).values() == [0, 0]


def test_an_endpoint_may_be_called_reload(mesh2: ProcMesh) -> None:
    class Weights(Actor):
        @endpoint
        def reload(self, path: str) -> str:
            return path

    weights = mesh2.spawn("weights", Weights)
    assert weights.reload.call("best").get(20).values() == ["best", "best"]
