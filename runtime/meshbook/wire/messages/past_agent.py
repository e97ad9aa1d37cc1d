"""Calls that come past the agent: by sockets between two workers, by shortcuts between the controller and a rank."""

from __future__ import annotations

from meshbook.wire.messages.base import Header
from meshbook.wire.messages.calls import Call, DeathCause


class AskLane(Header, frozen=True, tag="lane?"):
    """A worker often calls this rank: a socket between the two would help. Answered by `LaneOffer`, or not at all."""

    mesh: int
    rank: int
    generation: int


class LaneOffer(Header, frozen=True, tag="laneoffer"):
    """A socket to that rank, whose descriptor comes with this."""

    number: int
    mesh: int
    rank: int
    generation: int


class TakeLane(Header, frozen=True, tag="lane!"):
    """The worker uses that socket from now on, behind what it has sent to its agent before."""

    number: int


class LaneOpened(Header, frozen=True, tag="laneopen"):
    """Another worker's `Call` and `Cancel` come by the socket whose descriptor comes with this."""


class CutLane(Header, frozen=True, tag="lanecut"):
    """The socket was closed, at either end."""

    number: int


class LaneLost(Header, frozen=True, tag="lanelost"):
    """Nothing that was sent over that socket will be answered any more."""

    number: int
    death: DeathCause


class ShortcutOpened(Header, frozen=True, tag="shortcut"):
    """A rank tells the controller where calls to its main thread, or to its mailboxes, may come past the agent."""

    mesh: int
    rank: int
    is_mail: bool


class Heard(Header, frozen=True, tag="heard"):
    """The controller has the answer to this call, which came past the agent."""

    call: int


class CameEarly(Header, frozen=True, tag="early"):
    """A call has come past the agent, which is to know it, and passes it on to its other ranks; our answer follows."""

    call: Call


class ControllerGone(Header, frozen=True, tag="gone"):
    """The controller has ended, or has left: what came past the agent and was not answered or heard is the agent's."""


class ToldAll(Header, frozen=True, tag="told"):
    """The answer to `ControllerGone`, on both lanes for calls: all that came past the agent was told before."""
