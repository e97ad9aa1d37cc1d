"""The end of the C++ groups that nobody speaks through any more.

A group must not be destroyed while an operation is under way: its destructor waits for it. `dispose` ends them first.
Accepted connections are shut down, which ends what waits for a peer on both sides. What waits for a peer to connect has
no socket yet: a connection of our own, which greets as that peer would and then ends, takes its place. The listening
socket is left alone, since gloo ends the process when it fails.
"""

from __future__ import annotations

import time
from collections.abc import Iterable

from meshbook.concurrency.background import run_in_background
from meshbook.groups.backend_group import BackendGroup
from meshbook.groups.torn import settle

GIVE_UP_AFTER_S = 600.0
"""Operations that have not ended so long after their group was given up keep it for the life of the process."""

_GRACE_S = 2.0
"""A group that was given up listens so much longer: who connects late to a closed port tries again for half an hour."""

_LOOK_S = 0.02
_AGAIN_S = 0.25
_kept_for_ever: list[BackendGroup] = []


def dispose(groups: Iterable[BackendGroup]) -> None:
    """Destroy groups whose waits were all ended, aside, as soon as nothing is under way in them."""
    left = list(groups)
    aborted = [group for group in left if group.dead]
    for group in left:
        group.give_up("its process group was given up")
    if left:
        torn = [(each, group.is_lost) for group in left for each in group.take_torn()]
        guard = left[0].guard
        run_in_background(lambda: _dispose(left, aborted))
        if torn:
            restored, _ = settle(torn)
            guard.restored += restored


def _dispose(left: list[BackendGroup], aborted: list[BackendGroup]) -> None:
    _end_operations(aborted, greet=False)  # also of idle ones: peers wait for what comes over their connections
    lost = [group for group in left if group.is_lost]
    _kept_for_ever.extend(lost)
    _end_operations(lost, greet=True)
    left[:] = [group for group in left if not group.is_lost]
    begun = again = time.monotonic()
    while (now := time.monotonic()) < begun + _GRACE_S or (
        any(group.busy for group in left) and now < begun + GIVE_UP_AFTER_S
    ):
        if now >= again:
            again = now + _AGAIN_S
            _end_operations([group for group in left if group.busy], greet=now < begun + 2 * _AGAIN_S)
        time.sleep(_LOOK_S)
    # gloo's thread ends when it has nothing to read. A connection that ends while its group is destroyed is not closed
    # any more, only read again and again, and whoever destroys the group waits for that thread: so all end before.
    _end_operations(left, greet=False)
    closed = time.monotonic() + _GRACE_S
    while any(group.connected for group in left) and time.monotonic() < closed:
        time.sleep(_LOOK_S)
    _kept_for_ever.extend(group for group in left if group.busy or group.connected)
    left.clear()


def _end_operations(groups: list[BackendGroup], greet: bool) -> None:
    for group in groups:
        group.end_operations(greet)
