"""What each rank does first with its process group, done once in the template.

A rank that forms its first group writes all over the memory that it shares with the template: code is specialised where
it runs for the first time, names enter the interpreter's caches, dictionaries and lists grow. Forks of a process in
which all of that has happened find it done, and shared: 1.6 MB of the 11 that a rank has of its own.

A group of one needs no peer, and gloo's thread ends with it, so that the process may be forked afterwards.
"""

from __future__ import annotations

import os

from meshbook.concurrency.patches import patches_undone
from meshbook.groups.rank_groups import RankGroups
from meshbook.groups.store_client import StoreReply
from meshbook.wire.kv_store import KeyValueStore, StoreOp, StoreResult
from meshbook.wire.messages import Identity

_ALONE = Identity(
    mesh=0, name="", host="", device="cpu", rank=0, world_size=1, local_rank=0, local_world_size=1, host_rank=0,
    hosts=1, axes=("gpus",), sizes=(1,), threads=1,
)  # fmt: skip


def rehearse_groups() -> None:
    """Form a default group of this process alone, and leave nothing of it. Raises: whatever forming it raises."""
    store: KeyValueStore[int] = KeyValueStore()

    def ask(op: StoreOp, timeout_s: float, answer: StoreReply) -> StoreResult:
        return store.request(0, 0, op)[0][2]  # a store of one has each answer at once

    environment = dict(os.environ)
    try:
        with patches_undone():
            groups = RankGroups()
            try:
                groups.form(ask, _ALONE, epoch=0)
            finally:
                groups.forget()
    finally:
        os.environ.clear()
        os.environ.update(environment)
