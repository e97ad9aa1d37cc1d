"""The messages between templates and the processes that have workers or hosts forked from them. Pure."""

from __future__ import annotations

import msgspec

FDS_PER_WORKER = 5  # call socket, urgent socket, mail socket, stdout, stderr


class ForkWorkers(msgspec.Struct, tag="fork", frozen=True):
    """A request to fork ``count`` workers; their descriptors follow in ``count`` packets."""

    agent_pid: int
    count: int


class ForkTemplate(msgspec.Struct, tag="template", frozen=True):
    """A request to fork another template that has also imported ``preload``; its socket follows in one packet."""

    agent_pid: int
    preload: tuple[str, ...]
    sys_path: tuple[bytes, ...]


class TemplateReady(msgspec.Struct, tag="ready", frozen=True):
    """The template is ready. ``problem``: why it must not be forked. ``failure``: a failed import's traceback."""

    pid: int
    seconds: float
    problem: str = ""
    failure: str = ""
    version: str = ""  # versions of its Python and of us, which have to be those of the agent
    inherited: str = ""  # the inheritance of agents, for a template of hosts that serves every launcher


class Forked(msgspec.Struct, tag="forked", frozen=True):
    """A worker or a host was forked; as the first message of a forked template: itself, which imports next."""

    pid: int


class ForkFailed(msgspec.Struct, tag="nofork", frozen=True):
    """The oldest request is given up; workers of it that were named before are the agent's to end."""

    reason: str


class ForkHost(msgspec.Struct, tag="host", frozen=True):
    """A request to fork a host agent; its stdin and its log follow in one packet."""

    environment: dict[bytes, bytes]
    folder: bytes


class ReapHost(msgspec.Struct, tag="reap", frozen=True):
    """A question how a host agent has ended."""

    pid: int


class HostReaped(msgspec.Struct, tag="reaped", frozen=True):
    """The end of a host agent: its exit code, or its signal as a negative number."""

    status: int


Request = ForkWorkers | ForkTemplate
TemplateAnswer = TemplateReady | Forked | ForkFailed
decode_request = msgspec.msgpack.Decoder(Request).decode
decode_answer = msgspec.msgpack.Decoder(TemplateAnswer).decode
HostRequest = ForkHost | ReapHost
HostAnswer = TemplateReady | Forked | HostReaped | ForkFailed
decode_host_request = msgspec.msgpack.Decoder(HostRequest).decode
decode_host_answer = msgspec.msgpack.Decoder(HostAnswer).decode
