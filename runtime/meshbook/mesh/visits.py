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
from meshbook.source.location import ThreadStack
from meshbook.stacks.mesh_stacks import MeshStacks
from meshbook.wire.visits import Visit, VisitAnswer, encode

STACKS_S, NATIVE_S = 3.0, 20.0
"""The time for reading stacks from outside; native ones need the symbols of all libraries."""


def receive_visits(controller: Controller, leave: Callable[[Controller], None]) -> None:
    """Answer the visits to a controller. leave: leaves its session to the process that asks for it."""
    controller.receive_visits(functools.partial(_receive, controller, leave))


def _receive(
    controller: Controller, leave: Callable[[Controller], None], asked: bytes, send: Callable[[bytes], None]
) -> None:
    try:
        visit = msgspec.json.decode(asked, type=Visit)
        if visit.asks == "leave":
            send(encode(VisitAnswer()))  # first: there is no socket afterwards, and the owner's signature tells the end
            leave(controller)
            return
        answer = _answer(controller, visit)
    except (MeshError, OSError, msgspec.DecodeError) as error:
        answer = VisitAnswer(failure=str(error))
    send(encode(answer))


def _answer(controller: Controller, visit: Visit) -> VisitAnswer:
    """Raises: MeshError, OSError."""
    procs = _find(controller, visit.mesh)
    if visit.asks == "stop":
        procs.stop()
        return VisitAnswer(f'mesh "{procs.name}" stopped')
    timeout_s = NATIVE_S if visit.native else STACKS_S
    stacks = procs.stacks(all_threads=visit.all_threads, native=visit.native, timeout_s=timeout_s)
    return VisitAnswer(stacks.text(all_frames=visit.all_frames), plain_stacks(stacks, all_frames=visit.all_frames))


def _find(controller: Controller, name: str) -> ProcMesh:
    for known in controller.known_meshes():
        procs = ProcMesh(controller, known)
        if procs.name == name and procs.alive:
            return procs
    raise MeshError(f'mesh "{name}" has ended meanwhile')


def plain_stacks(stacks: MeshStacks, *, all_frames: bool) -> dict[str, Any]:
    """Return stacks as plain data: the verdict, and each rank's state and frames, innermost first."""

    def frames_of(thread: ThreadStack) -> list[dict[str, Any]]:
        frames = thread.frames if all_frames else thread.users
        return [{"file": each.file, "line": each.line, "function": each.function} for each in frames]

    ranks = [
        {
            "rank": one.rank,
            "state": one.state,
            "doing": one.doing,
            "busy_s": round(one.busy_s, 3),
            "threads": [{"name": each.name, "frames": frames_of(each)} for each in one.threads],
            "problem": one.problem,
        }
        for one in stacks
    ]
    return {"verdict": stacks.verdict.text if stacks.verdict is not None else "", "ranks": ranks}
