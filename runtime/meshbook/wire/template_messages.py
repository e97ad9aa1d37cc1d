"""What templates and those who have workers or hosts forked from them say to each other. Pure."""

from __future__ import annotations

import msgspec

FDS_PER_WORKER = 5
"""call socket, urgent socket, mail socket, stdout, stderr"""


class ForkWorkers(msgspec.Struct, tag="fork", frozen=True):
    """Fork ``count`` workers; their descriptors follow in ``count`` packets."""

    agent_pid: int
    count: int


class ForkTemplate(msgspec.Struct, tag="template", frozen=True):
    """Fork another template that has also imported ``preload``; its socket follows in one packet."""

    agent_pid: int
    preload: tuple[str, ...]
    sys_path: tuple[bytes, ...]


class TemplateReady(msgspec.Struct, tag="ready", frozen=True):
    """``problem`` says why workers may not be forked from here; ``failure`` is the traceback of a failed import."""

    pid: int
    seconds: float
    problem: str = ""
    failure: str = ""
    version: str = ""
    """Of its Python and of us, which have to be those of the agent."""
    inherited: str = ""
    """What the agents of a template of hosts that serves every launcher inherit from it."""


class TemplateForked(msgspec.Struct, tag="born", frozen=True):
    """The first word of a forked template, before it imports anything."""

    pid: int


class WorkerForked(msgspec.Struct, tag="forked", frozen=True):
    pid: int


class ForkFailed(msgspec.Struct, tag="nofork", frozen=True):
    """The oldest request is given up; workers of it that were named before are the agent's to end."""

    reason: str


class ForkHost(msgspec.Struct, tag="host", frozen=True):
    """Fork a host agent; its stdin and its log follow in one packet.

    environment: comes on top of the template's, and with a ``folder`` to begin in stands in its place.
    """

    environment: dict[bytes, bytes]
    folder: bytes = b""


class ReapHost(msgspec.Struct, tag="reap", frozen=True):
    """A host agent has ended: how?"""

    pid: int


class HostForked(msgspec.Struct, tag="hosted", frozen=True):
    pid: int


class HostReaped(msgspec.Struct, tag="reaped", frozen=True):
    """With its exit code, or its signal as a negative number."""

    status: int


Request = ForkWorkers | ForkTemplate


TemplateAnswer = TemplateReady | TemplateForked | WorkerForked | ForkFailed


decode_request = msgspec.msgpack.Decoder(Request).decode


decode_answer = msgspec.msgpack.Decoder(TemplateAnswer).decode


HostRequest = ForkHost | ReapHost


HostAnswer = TemplateReady | HostForked | HostReaped | ForkFailed


decode_host_request = msgspec.msgpack.Decoder(HostRequest).decode


decode_host_answer = msgspec.msgpack.Decoder(HostAnswer).decode
