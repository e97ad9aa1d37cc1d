"""What a rank has in place of process groups when its mesh was spawned without torch. Imports no torch."""

from __future__ import annotations

from collections.abc import Callable, Collection
from typing import TYPE_CHECKING, NoReturn

from meshbook.errors import UsageError
from meshbook.groups.progress import Collectives, OperationLog

if TYPE_CHECKING:
    from meshbook.groups.use import Handled

WITHOUT_TORCH = (
    "this mesh was spawned without torch, so its ranks have no process groups and no collectives. Spawn one that has: "
    "without torch=False, or without --no-torch."
)


class NoGroups:
    """As much of `meshbook.groups.rank_groups.RankGroups` as ranks without torch are asked for."""

    formed = destroyed = False
    moved_bytes = 0

    def require(self, *_args: object, **_options: object) -> NoReturn:
        raise UsageError(WITHOUT_TORCH)

    form = prove = device_mesh = require

    def prepare(self, *_args: object, **_options: object) -> None:
        pass  # the ranks do not meet

    def keep_environment(self) -> None:
        pass

    def ask_of_actors(self, handled: Callable[[], Handled]) -> None:
        pass

    def abort(self, epoch: int, reason: str, names: Collection[str] = ()) -> None:
        pass

    def on_new_controller(self) -> None:
        pass

    def hold_deadlines(self, held: bool) -> None:
        pass

    def interrupt_backward(self) -> None:
        pass

    def note_failed(self, call: int) -> None:
        pass

    def log_operations(self, log: OperationLog | None) -> None:
        pass

    def tell(self) -> bytes:
        return b""

    def waits_in(self, thread: int) -> str:
        return ""

    def waited_s(self, thread: int) -> float:
        return 0.0

    def collectives(self, call: int, *, recent: int = 0, look_deeper: bool = False) -> Collectives:
        return Collectives(-1, call, (), (), "")


class _NoDistributed:
    """The name ``dist`` on such a rank."""

    def __getattr__(self, name: str) -> NoReturn:
        raise AttributeError(WITHOUT_TORCH)


NO_DISTRIBUTED = _NoDistributed()
