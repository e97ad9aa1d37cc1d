"""What the controller is told of a rank's process groups: news with each answer, and how far they are when it asks."""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence

from meshbook.groups.agreements import Progress, Splits, Told, encode_told
from meshbook.groups.backend_group import BegunOperation
from meshbook.groups.factory import GroupFactory
from meshbook.groups.group import AbortableGroup
from meshbook.groups.group_state import GroupState
from meshbook.groups.progress import Collectives, Waiting
from meshbook.groups.records import MessageRecord
from meshbook.source.location import users_place
from meshbook.source.thread_frames import frame_of

LATE_S = 1.0
"""Operations that are under way for longer are told of."""


class GroupReports:
    """Read from any thread."""

    def __init__(self, guard: GroupState, factory: GroupFactory) -> None:
        self._guard, self._factory = guard, factory

    def tell(self) -> bytes:
        """What of the groups is news to the controller (`meshbook.groups.agreements.Told`)."""
        guard = self._guard
        if not (guard.used or guard.broken or guard.torn or guard.copied or guard.restored):
            return b""
        used, guard.used = guard.used, set()
        broken, guard.broken = guard.broken, False
        torn, guard.torn = guard.torn, []
        copied, guard.copied = guard.copied, []
        restored, guard.restored = guard.restored, []
        groups = [group for group in used if isinstance(group, AbortableGroup) and not group.retired]
        told = [Progress(group.recipe.name, *group.record.told) for group in groups]
        told += [Progress(each.name, *each.told) for each in used if isinstance(each, MessageRecord)]
        splits = [
            Splits(group.recipe.name, *group.record.splits, len(group.recipe.ranks))
            for group in groups
            if group.record.splits[0]
        ]
        news = Told(guard.epoch, tuple(told), tuple(torn), tuple(copied), tuple(restored), broken, tuple(splits))
        return encode_told(news)

    def collectives(self, call: int, recent: int, look_deeper: bool, destroyed: bool) -> Collectives:
        """As `meshbook.groups.rank_groups.RankGroups.collectives`."""
        guard = self._guard
        groups = tuple(group.progress(recent) for group in list(self._factory.groups.values()))
        waiting = guard.describe_waits() or self._on_devices()
        epoch = guard.epoch if groups else -1
        waited_s = sum(list(guard.waited_s.values()))  # first: a wait that ends meanwhile is not counted twice
        waited_s += sum(time.monotonic() - work.since for work in list(guard.waits.values()))
        under_way = self._under_way() if look_deeper and not waiting else ()
        told = Collectives(epoch, call, groups, waiting, guard.reason, waited_s, under_way, destroyed=destroyed)
        failed_in, call, counts = guard.last_failure
        return told._replace(failed_call=call, failed_at=counts) if failed_in == epoch else told

    def _on_devices(self) -> tuple[Waiting, ...]:
        """What CUDA waits for, and with it whoever needs its results, whether a thread of ours is in a wait or not."""
        inners = [inner for group in list(self._factory.groups.values()) if (inner := group.inner) and inner.on_device]
        if not inners or any(inner.dead for inner in inners):
            return ()
        return self._late([(inner.name, begun) for inner in inners if (begun := inner.oldest_on_device()) is not None])

    def _under_way(self) -> tuple[Waiting, ...]:
        inners = [inner for group in list(self._factory.groups.values()) if (inner := group.inner) and not inner.dead]
        return self._late([(inner.name, begun) for inner in inners if (begun := inner.oldest()) is not None])

    def _late(self, oldest: Sequence[tuple[str, BegunOperation]]) -> tuple[Waiting, ...]:
        now = time.monotonic()
        late = [(name, begun) for name, begun in oldest if now - begun[4] > LATE_S]
        if not late:
            return ()
        place = users_place(frame_of(threading.main_thread().ident))
        return tuple(
            Waiting(name, operation, number, peer, place, now - since)
            for name, (_, operation, number, peer, since, _) in late
        )
