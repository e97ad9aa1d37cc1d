"""The store by which process groups form, and how their waits are ended."""

from __future__ import annotations

from meshbook.wire.kv_store import StoreOp, StoreResult
from meshbook.wire.messages.base import Header, Target


class AbortGroups(Header, frozen=True, tag="abort"):
    """End every wait of process groups of up to ``epoch``, and refuse their later operations, until they are formed
    under a higher one. Ranks raise `meshbook.errors.GroupAborted` with ``reason``."""

    mesh: int
    target: Target
    epoch: int
    reason: str
    groups: tuple[str, ...] = ()
    """Only these; all where there are none."""


class StoreRequest(Header, frozen=True, tag="store"):
    """A rank asks the store of its mesh, which the agent of host 0 keeps; the controller passes it on there."""

    mesh: int
    rank: int
    request: int
    op: StoreOp


class StoreAnswer(Header, frozen=True, tag="stored"):
    """What the store answers, on its way back to the agent of that rank."""

    mesh: int
    rank: int
    request: int
    result: StoreResult


class DropClient(Header, frozen=True, tag="dropclient"):
    """To the host of the store: a rank on another host has ended and waits for nothing any more."""

    mesh: int
    rank: int


class DropKeys(Header, frozen=True, tag="dropkeys"):
    """To the host of the store: delete the keys under ``prefix``; ranks that wait for one of them get an error."""

    mesh: int
    prefix: str


class StoreLost(Header, frozen=True, tag="storelost"):
    """To the other hosts: the host of the store is lost; who waits for an answer gets an error."""

    mesh: int
    reason: str


class AskAgain(Header, frozen=True, tag="askagain"):
    """To hosts that do not keep the store: a new controller passes questions on from now on, so ask what is open."""

    mesh: int


class RankStore(Header, frozen=True, tag="rstore"):
    request: int
    op: StoreOp


class RankStored(Header, frozen=True, tag="rstored"):
    request: int
    result: StoreResult
