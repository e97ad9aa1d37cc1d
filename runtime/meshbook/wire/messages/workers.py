"""How a worker begins, and who it is."""

from __future__ import annotations

import msgspec

from meshbook.errors.advice import Advice
from meshbook.wire.messages.base import Header
from meshbook.wire.messages.meshes import StartCommand


class Identity(msgspec.Struct, array_like=True, frozen=True):
    """Who a worker is: what torchrun would tell it, and the axes of its mesh."""

    mesh: int
    name: str
    """Of the mesh."""
    host: str
    device: str
    """``cpu``, or ``cuda`` with any index."""
    rank: int
    world_size: int
    local_rank: int
    local_world_size: int
    host_rank: int
    hosts: int
    """How many hosts the mesh lies on; ranks may be more on one host than on another."""
    axes: tuple[str, ...]
    sizes: tuple[int, ...]
    threads: int
    generation: int = 0
    """Of the numbers of its mesh's ranks."""
    host_id: str = ""
    """Of its host, among those of the session; `host` is what people call it."""


class Begin(Header, frozen=True, tag="begin"):
    """The first message to a worker."""

    identity: Identity
    marker: bytes
    """Written to stdout and stderr, followed by an output id, where another output begins."""
    preload: tuple[str, ...]
    cwd: bytes | None
    sys_path: tuple[bytes, ...]
    environment: dict[bytes, bytes]
    advice: Advice = Advice()
    shares_files: bool = True
    command: StartCommand = StartCommand()
    binding: dict[str, str] = {}
    shortcut: str = ""
    """The path of the controller's end of shortcuts (`meshbook.wire.shortcuts`); empty: there is none here."""


class Renumbered(Header, frozen=True, tag="renumbered"):
    """Who the worker is from now on; travels among the calls, in their order."""

    identity: Identity


class Begun(Header, frozen=True, tag="begun"):
    pid: int
    control_thread: int = 0
    """The kernel's number of the thread that takes the signal for a dump (`meshbook.stacks.dump`)."""
    dump_fd: int = -1
    """Where the dump goes, a descriptor of the worker's; -1 where it makes none."""


class OpenMail(Header, frozen=True, tag="mail"):
    """The first message on the mail lane follows: somebody must read there from now on."""
