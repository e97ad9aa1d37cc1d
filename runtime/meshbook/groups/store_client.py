"""A `torch.distributed.Store` over the worker's own link: no port, no DNS, interruptible.

Three kinds of threads call it: the user's (init_process_group, new_group, DDP), gloo's workers (they connect lazily, on
the first operation between two ranks) and NCCL's watchdogs. The C++ side takes the GIL for each call and every waiting
happens inside ``rpc``, which waits without it, so a waiting thread never keeps another from answering. torch lets
go of the GIL before it destroys a process group, so a watchdog that is being joined can finish its call.

torch holds the C++ half of the object only. When the Python half is collected its methods are gone, and a later call
from C++ fails with "Not implemented". So stores are kept for the life of the process, a few hundred bytes each.
"""

from __future__ import annotations

import contextlib
import itertools
import queue
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import ClassVar, TypeAlias

from torch.distributed import DistError, DistStoreError

from meshbook.errors import GroupAborted
from meshbook.torch_internals import Store
from meshbook.wire.kv_store import StoreOp, StoreOpName, StoreResult

StoreReply: TypeAlias = "queue.SimpleQueue[StoreResult]"

Rpc: TypeAlias = Callable[[StoreOp, float, StoreReply], StoreResult]
"""``rpc(op, timeout_s, answer)``: ask the server and wait for the reply that another thread puts into ``answer``;
callable from any thread; TimeoutError when nothing came."""

DEFAULT_TIMEOUT_S = 300.0
"""The timeout of torch's own stores; `init_process_group` sets it to the group's timeout."""

ANSWER_GRACE_S = 30.0
"""Operations that never wait for keys get at least this long: their answer only has to travel."""

_LAST_WORD_TIMEOUT_S = 1.0
_ABORTED = StoreResult(error="aborted")


class LinkStore(Store):
    """The rank's side of `meshbook.wire.kv_store.KeyValueStore`."""

    timeout: timedelta
    """Set by `set_timeout`, which torch calls."""
    _alive: ClassVar[list[LinkStore]] = []
    _tokens: ClassVar[itertools.count[int]] = itertools.count(1)

    def __init__(self, rpc: Rpc, timeout_s: float = DEFAULT_TIMEOUT_S) -> None:
        super().__init__()
        self._rpc = rpc
        self._closed = False
        self._aborted = ""
        self._open: set[StoreReply] = set()
        self.set_timeout(timedelta(seconds=timeout_s))
        self._alive.append(self)

    def close(self) -> None:
        """Refuse further calls with DistStoreError, those of groups that outlived their end included."""
        self._closed = True

    def abort(self, reason: str) -> None:
        """End all waits, and refuse further calls, with GroupAborted; from any thread."""
        self._aborted = self._aborted or reason
        for answer in list(self._open):
            answer.put(_ABORTED)

    def clone(self) -> LinkStore:
        """Return itself: any number of threads may share a store, and a copy would have to be kept alive as well."""
        return self

    def has_extended_api(self) -> bool:
        """Yes: append, multi_get and multi_set exist, which saves gloo a round trip per peer."""
        return True

    # ---- operations that wait for keys ----------------------------------------------------------------------------

    def get(self, key: str) -> bytes:
        """Return the value of ``key``, waiting for it. Raises: DistStoreError after the store's timeout."""
        return self._await("get", [key], None).values[0]

    def multi_get(self, keys: Sequence[str]) -> list[bytes]:
        """Return the values of ``keys``, waiting for all. Raises: DistStoreError after the store's timeout."""
        return list(self._await("multi_get", keys, None).values)

    def wait(self, keys: Sequence[str], timeout: timedelta | None = None) -> None:
        """Wait until all ``keys`` exist. Raises: DistStoreError after ``timeout``, else the store's."""
        self._await("wait", keys, timeout)

    def _await(self, op: StoreOpName, keys: Sequence[str], timeout: timedelta | None) -> StoreResult:
        timeout_s = (self.timeout if timeout is None else timeout).total_seconds()
        token = next(self._tokens)
        try:
            return self._ask(StoreOp(op, tuple(keys), token=token), timeout_s)
        except TimeoutError:
            self._try(StoreOp("cancel", token=token))
            names = ", ".join(keys[:3]) + (f" and {len(keys) - 3} more" if len(keys) > 3 else "")
            raise DistStoreError(f"wait timeout after {timeout_s:g} s, keys: {names}") from None
        except (KeyboardInterrupt, GroupAborted):
            self._try(StoreOp("cancel", token=token))
            raise

    def _try(self, op: StoreOp) -> None:
        # at the latest the server forgets this client's requests with the epoch's keys
        with contextlib.suppress(TimeoutError, OSError, DistError):
            self._rpc(op, _LAST_WORD_TIMEOUT_S, queue.SimpleQueue())

    # ---- operations that are answered at once ---------------------------------------------------------------------

    def set(self, key: str, value: str | bytes) -> None:
        """Store ``value`` under ``key``."""
        self._tell(StoreOp("set", (key,), (_to_bytes(value),)))

    def multi_set(self, keys: Sequence[str], values: Sequence[str | bytes]) -> None:
        """Store ``values[i]`` under ``keys[i]``, all at once."""
        self._tell(StoreOp("multi_set", tuple(keys), tuple(map(_to_bytes, values))))

    def append(self, key: str, value: str | bytes) -> None:
        """Add to the end of the value of ``key``; a missing key counts as empty."""
        self._tell(StoreOp("append", (key,), (_to_bytes(value),)))

    def add(self, key: str, value: int) -> int:
        """Add to the counter ``key``, which starts at 0, and return the sum."""
        return self._tell(StoreOp("add", (key,), amount=value)).number

    def check(self, keys: Sequence[str]) -> bool:
        """Whether all ``keys`` exist now."""
        return bool(self._tell(StoreOp("check", tuple(keys))).number)

    def compare_set(self, key: str, expected: str | bytes, desired: str | bytes) -> bytes:
        """Store ``desired`` if ``key`` holds ``expected``; return its value afterwards."""
        values = (_to_bytes(expected), _to_bytes(desired))
        return self._tell(StoreOp("compare_set", (key,), values)).values[0]

    def delete_key(self, key: str) -> bool:
        """Delete ``key``; whether it existed."""
        return bool(self._tell(StoreOp("delete", (key,))).number)

    def delete_keys(self, keys: Sequence[str]) -> int:
        """Delete all of ``keys`` in one round trip; how many existed. Not part of torch's interface."""
        return self._tell(StoreOp("delete", tuple(keys))).number

    def withdraw(self, key: str) -> None:
        """Delete ``key`` if the server can be reached within a second, on the way out of something that failed."""
        self._try(StoreOp("delete", (key,)))

    def num_keys(self) -> int:
        """Return how many keys the server holds, those of other groups and prefixes included."""
        return self._tell(StoreOp("num_keys")).number

    def list_keys(self) -> list[str]:
        """Return all keys of the server, those of other groups and prefixes included."""
        return [key.decode() for key in self._tell(StoreOp("list_keys")).values]

    deleteKey = delete_key  # the names by which C++ looks some of them up
    getNumKeys = num_keys
    listKeys = list_keys

    def _tell(self, op: StoreOp) -> StoreResult:
        try:
            return self._ask(op, max(self.timeout.total_seconds(), ANSWER_GRACE_S))
        except TimeoutError as error:
            raise DistStoreError(str(error)) from None

    def _ask(self, op: StoreOp, timeout_s: float) -> StoreResult:
        if self._closed:
            raise DistStoreError(f"{op.op}: this store was closed with the process group that it served")
        answer: StoreReply = queue.SimpleQueue()
        self._open.add(answer)
        try:
            if self._aborted:
                raise GroupAborted(self._aborted)
            result = self._rpc(op, timeout_s, answer)
        finally:
            self._open.discard(answer)
        if result is _ABORTED:
            raise GroupAborted(self._aborted)
        if result.error:
            raise DistStoreError(result.error)
        return result


def _to_bytes(value: str | bytes) -> bytes:
    return value.encode() if isinstance(value, str) else bytes(value)
