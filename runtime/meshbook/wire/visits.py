"""A visit: a process of the same user asks the controller of a session something, by its Unix socket, and hangs up.

So a terminal looks at the meshes of a notebook that is alive, and ends them, while the notebook's cell runs or hangs:
the thread of the controller that serves the hosts takes the question.

    question    "visit" | `VisitQuestion` as JSON
    answer      `VisitAnswer` as JSON
"""

from __future__ import annotations

import os
import socket
from pathlib import Path
from typing import Any, Literal

import msgspec

from meshbook.errors import MeshError, ProtocolError
from meshbook.wire.frames import FrameSocket
from meshbook.wire.unix_transport import SCHEME, VISIT, control_endpoint, peer_user


class VisitQuestion(msgspec.Struct, frozen=True):
    """The question of a visit."""

    asks: Literal["stacks", "stop", "leave"]
    mesh: str = ""  # its name; empty for ``leave``, which is about the whole session
    all_frames: bool = False  # options of stacks
    all_threads: bool = False
    native: bool = False


class VisitAnswer(msgspec.Struct, frozen=True):
    """The answer to a visit."""

    text: str = ""
    data: Any = None  # the same for programs
    failure: str = ""  # why it was not done; empty where it was


encode = msgspec.json.encode


def pay_visit(session: Path, asked: VisitQuestion, timeout_s: float) -> VisitAnswer:
    """Ask the controller of a session. session: its folder.

    Raises: MeshError where it could not do it, OSError where it cannot be reached, TimeoutError where it does not
    answer in time, ProtocolError for an answer of another version.
    """
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as sock:
        sock.settimeout(timeout_s)
        sock.connect(control_endpoint(session).removeprefix(SCHEME))
        if peer_user(sock) != os.geteuid():
            raise PermissionError(f"{session} is served by another user")
        channel = FrameSocket(sock)
        channel.send([VISIT, encode(asked)])
        if not channel.wait(timeout_s):
            raise TimeoutError(f"no answer within {timeout_s:g} s")
        frames = channel.receive()
    if not frames:
        raise ProtocolError("it takes no visits; its Meshbook may be an older one")
    try:
        answer = msgspec.json.decode(frames[0], type=VisitAnswer)
    except msgspec.DecodeError as error:
        raise ProtocolError(f"its answer cannot be read; its Meshbook may be another one: {error}") from None
    if answer.failure:
        raise MeshError(answer.failure)
    return answer
