"""The road to a host breaks and comes back: every call runs once, in order, and every answer arrives."""

from __future__ import annotations

import time
from collections.abc import Iterator

import pytest
import torch

from benchmarks.faults.relay import Relay, RelayedLauncher
from meshbook import ProcMesh, start_hosts


@pytest.fixture(params=["unix", "tcp"])
def relayed(clean_end: None, request: pytest.FixtureRequest) -> Iterator[tuple[ProcMesh, Relay]]:
    launcher = RelayedLauncher(separate_hosts=request.param == "tcp")
    mesh = start_hosts({}, launcher).spawn_procs({"gpus": 2}, owns_hosts=True)
    assert launcher.relay is not None
    yield mesh, launcher.relay
    mesh.stop()
    launcher.close()


def _append(number: int) -> int:
    import __main__

    __main__.numbers.append(number)
    return number


def test_calls_run_once_and_in_order_across_cuts(relayed: tuple[ProcMesh, Relay]) -> None:
    mesh, relay = relayed
    mesh.push({"numbers": []}).get(30)
    futures, cuts = [], 0
    for number in range(300):
        futures.append(mesh.execute(_append, number))
        if number % 60 == 30:
            cuts += relay.cut()
            time.sleep(0.2)
    assert cuts >= 3
    assert [future.get(60).values() for future in futures] == [[number, number] for number in range(300)]
    assert mesh.pull("numbers").get(30).values() == [list(range(300))] * 2


@pytest.mark.quick("unix")
def test_a_large_payload_survives_a_cut(relayed: tuple[ProcMesh, Relay]) -> None:
    mesh, relay = relayed
    big = torch.arange(8_000_000, dtype=torch.float32)
    pushed = mesh.push({"big": big})
    time.sleep(0.05)
    relay.cut()
    pushed.get(60)
    pulled = mesh.pull("big")
    time.sleep(0.05)
    relay.cut()
    assert all(torch.equal(value, big) for value in pulled.get(60).values())
