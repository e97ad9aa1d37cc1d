"""The controller's end of visits (`meshbook.wire.visits`): a terminal asks for stacks, ends a mesh, or takes a session.

The questions are answered on a thread of their own, while the main thread waits for ranks, or computes.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import msgspec

from meshbook.controller.controller import Controller
from meshbook.errors import MeshError
from meshbook.mesh.proc_mesh import ProcMesh
from meshbook.stacks.mesh_stacks import MeshStacks
from meshbook.wire.visits import VisitAnswer, VisitQuestion, encode

STACKS_S, NATIVE_S = 3.0, 20.0
"""The time for reading stacks from outside; native ones need the symbols of all libraries."""


def receive_visits(controller: Controller, leave: Callable[[Controller], None]) -> None:
    """Answer the visits to a controller. leave: leaves its session to the process that asks for it."""
    controller.receive_visits(functools.partial(_receive, controller, leave))


def _receive(
    controller: Controller, leave: Callable[[Controller], None], asked: bytes, send: Callable[[bytes], None]
) -> None:
    try:
        question = msgspec.json.decode(asked, type=VisitQuestion)
        if question.asks == "leave":
            send(encode(VisitAnswer()))  # first: there is no socket afterwards, and the owner's signature tells the end
            leave(controller)
            return
        answer = _answer(controller, question)
    except (MeshError, OSError, msgspec.DecodeError) as error:
        answer = VisitAnswer(failure=str(error))
    send(encode(answer))


def _answer(controller: Controller, question: VisitQuestion) -> VisitAnswer:
    """Raises: MeshError, OSError."""
    meshes = (ProcMesh(controller, known) for known in controller.known_meshes())
    procs = next((procs for procs in meshes if procs.name == question.mesh and procs.alive), None)
    if procs is None:
        raise MeshError(f'mesh "{question.mesh}" has ended meanwhile')
    if question.asks == "stop":
        procs.stop()
        return VisitAnswer()
    timeout_s = NATIVE_S if question.native else STACKS_S
    stacks = procs.stacks(all_threads=question.all_threads, native=question.native, timeout_s=timeout_s)
    return VisitAnswer(stacks.text(all_frames=question.all_frames), _plain(stacks, question.all_frames))


def _plain(stacks: MeshStacks, all_frames: bool) -> dict[str, Any]:
    """Return stacks as plain data: the verdict, and each rank's state and frames, innermost first."""
    ranks: list[dict[str, Any]] = []
    for one in stacks:
        told: dict[str, Any] = {name: getattr(one, name) for name in ("rank", "state", "doing", "busy_s", "problem")}
        for thread in one.threads:
            frames = thread.frames if all_frames else thread.users
            lines = [{"file": each.file, "line": each.line, "function": each.function} for each in frames]
            told.setdefault("threads", {})[thread.name] = lines
        ranks.append(told)
    return {"verdict": stacks.verdict.text if stacks.verdict is not None else "", "ranks": ranks}
