"""The saves of a notebook's meshes: the last one of each, and those that are due from time to time."""

from __future__ import annotations

import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec

from meshbook.checkpoint.folder import DCP, Saved
from meshbook.concurrency.future import Future
from meshbook.formatting import format_duration


class LastSave(msgspec.Struct, frozen=True):
    """The last save of a mesh, as its notebook knows it."""

    path: str
    step: float | None
    at: float
    """Seconds since the epoch."""

    @classmethod
    def of(cls, saved: Saved) -> LastSave:
        return cls(str(saved.path), saved.step, saved.manifest.saved_at)

    def __str__(self) -> str:
        """``step 1200, 41 s ago``."""
        what = Path(self.path).name if self.step is None else f"step {self.step:g}"
        return f"{what}, {format_duration(time.time() - self.at)} ago"


class RegularSave(msgspec.Struct, frozen=True):
    """The saves of a mesh from time to time, between cells."""

    every_s: float
    folder: str
    names: tuple[str, ...] = ()
    keep: int | None = None
    format: str = DCP


class MeshSaves:
    """The saves that are known, by the names of meshes."""

    def __init__(self) -> None:
        self.last: dict[str, LastSave] = {}
        self.regular: dict[str, RegularSave] = {}
        self.writing: dict[str, Future[Any]] = {}
        """The saves that ranks write aside."""
        self.begun: dict[str, float] = {}
        """The time of the last regular save, by the clock of this process."""

    def await_written(self, name: str) -> None:
        """Wait for a save that the ranks of a mesh write; how it ends is told elsewhere. Raises: KeyboardInterrupt."""
        if (written := self.writing.get(name)) is not None:
            print("waits for a save that is being written; an interrupt leaves it and stops nothing", flush=True)
            written.wait()

    def forget(self, name: str) -> None:
        """Forget a mesh that was stopped."""
        for known in (self.last, self.regular, self.begun):
            known.pop(name, None)

    def take_up(self, last: Mapping[str, LastSave], regular: Mapping[str, RegularSave]) -> None:
        """Go on with what another kernel knew."""
        self.last.update(last)
        self.regular.update(regular)
        self.begun.update(dict.fromkeys(regular, time.monotonic()))
