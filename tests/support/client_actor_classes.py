"""Actors that tests spawn in their own process."""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import Any

import torch

from meshbook import ProcMesh
from meshbook.actor import Actor, MeshFailure, context, endpoint

added: list[int] = []


class Adder(Actor):
    def __init__(self, value: int = 0) -> None:
        self.value = value
        self.other: Any = None

    @endpoint
    def add(self, by: int) -> int:
        added.append(by)
        self.value += by
        return self.value

    @endpoint
    def pid(self) -> int:
        return os.getpid()

    @endpoint
    def double(self, tensor: torch.Tensor) -> torch.Tensor:
        return tensor.mul_(2)

    @endpoint
    def fail(self) -> None:
        raise ValueError("bad shard")

    @endpoint
    def sleep(self, seconds: float) -> None:
        time.sleep(seconds)

    @endpoint
    def add_there(self, other: Any, by: int) -> list[int]:
        values: list[int] = other.add.call(by).get().values()
        return values

    @endpoint
    def call_me_back(self, me: Any) -> int:
        value: int = me.add.call_one(1).get()
        return value


class Leader(Actor):
    """Spawns on ranks, and is told what becomes of that."""

    def __init__(self) -> None:
        self.told: list[str] = []

    @endpoint
    async def lead(self, procs: ProcMesh, by: int) -> list[int]:
        self.followers: Any = procs.spawn("followers", Adder)
        return (await self.followers.add.call(by)).values()

    @endpoint
    async def reports(self) -> list[str]:
        return self.told

    def __supervise__(self, failure: MeshFailure) -> bool:
        self.told.append(failure.report())
        return True


class Guest(Actor):
    @endpoint
    def spawn_at(self, procs: Any) -> Any:
        return procs.spawn("guest", Adder, 100)


class Ending(Actor):
    def __init__(self, path: str) -> None:
        self.path = path

    @endpoint
    def end(self, how: str) -> str:
        getattr(context().actor_instance, how)("had enough")
        time.sleep(0 if how != "kill" else 20)
        return "done"

    @endpoint
    def who(self) -> tuple[str, str, str, str, int]:
        me = context().actor_instance
        return repr(me), str(me.creator), me.actor_id, me.proc_id, len(me.proc_mesh)

    def __cleanup__(self, error: BaseException | None) -> None:
        Path(self.path).write_text(str(error))


class Backer(Actor):
    @endpoint
    def ask(self, through: Any, me: Any) -> int:
        value: int = through.call_me_back.call_one(me).get()
        return value

    @endpoint
    def add(self, by: int) -> int:
        return by
