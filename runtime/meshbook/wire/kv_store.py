"""The store through which torch.distributed's ranks find each other, server side: a state machine without I/O.

    rank --StoreOp--> controller: KeyValueStore.request() --[(client, request, StoreResult), ...]--> ranks

A request that must wait for keys gets no answer yet; the request that completes it returns both answers. There is no
clock here: a rank that gives up says so with ``cancel``. Semantics are those of torch's TCPStore, so that
rendezvous, PrefixStore and barriers behave as torch's own code expects.
"""

from __future__ import annotations

from collections.abc import Hashable
from typing import Generic, Literal, TypeAlias, TypeVar

import msgspec

StoreOpName: TypeAlias = Literal[
    "set", "get", "add", "check", "wait", "multi_get", "multi_set", "append", "compare_set", "delete",
    "num_keys", "list_keys", "cancel",
]  # fmt: skip


class StoreOp(msgspec.Struct, array_like=True, frozen=True):
    """A request of a rank.

    ========================  =====================  ========================================================
    op                        keys, values           answer
    ========================  =====================  ========================================================
    set, append, multi_set    n keys, n values       nothing
    get, multi_get            n keys                 ``values``, once all keys exist
    wait                      n keys                 nothing, once all keys exist
    add                       1 key, ``amount``      ``number``: the sum, also stored as decimal text
    check                     n keys                 ``number``: 1 if all exist
    compare_set               1 key, expected, new   ``values``: the key's value now
    delete                    n keys                 ``number``: how many of them existed
    num_keys                                         ``number``
    list_keys                                        ``values``: the keys as UTF-8
    cancel                    ``token``              ``number``: 1 if that request still waited; it is forgotten
    ========================  =====================  ========================================================
    """

    op: StoreOpName
    keys: tuple[str, ...] = ()
    values: tuple[bytes, ...] = ()
    amount: int = 0
    token: int = 0  # names a waiting request for ``cancel``; unique per client, 0 for requests that never wait


class StoreResult(msgspec.Struct, array_like=True, frozen=True):
    """The answer to one request; a non-empty ``error`` says why there is none."""

    values: tuple[bytes, ...] = ()
    number: int = 0
    error: str = ""


Client = TypeVar("Client", bound=Hashable)

# the client of an answer, the id that came with its request, and the answer
DueAnswer: TypeAlias = tuple[Client, int, StoreResult]

_DONE = StoreResult()


class _Waiter(Generic[Client]):
    """A request whose keys do not all exist yet; ``missing`` shrinks as they appear."""

    __slots__ = ("client", "missing", "op", "request_id")

    def __init__(self, client: Client, request_id: int, op: StoreOp) -> None:
        self.client, self.request_id, self.op = client, request_id, op
        self.missing: set[str] = set()


class KeyValueStore(Generic[Client]):
    """The keys, their values, and the clients that wait for keys. A client is any name, such as a rank."""

    def __init__(self) -> None:
        self._values: dict[str, bytes] = {}
        self._waiters: dict[int, _Waiter[Client]] = {}  # by serial number, so in order of arrival
        # waiters' serial numbers by missing key; may name waiters that are gone
        self._by_key: dict[str, list[int]] = {}
        self._serial = 0

    def __len__(self) -> int:
        return len(self._values)

    @property
    def waiting(self) -> int:
        """Return how many requests have no answer yet."""
        return len(self._waiters)

    def request(self, client: Client, request_id: int, op: StoreOp) -> list[DueAnswer[Client]]:
        """Carry out ``op``; return the answers that are due now, this request's own first. A request that makes no
        sense gets an answer with an error; no error of a client is raised here."""
        if error := _mistake(op):
            return [(client, request_id, StoreResult(error=error))]
        if op.op in ("get", "multi_get", "wait"):
            waiter = _Waiter(client, request_id, op)
            if self._is_complete(waiter):
                return [self._answer(waiter)]
            self._serial += 1
            self._waiters[self._serial] = waiter
            self._await(self._serial, waiter)
            return []
        result, changed = self._carry_out(client, op)
        answers = [(client, request_id, result)]
        if changed and self._by_key:
            answers += self._wake(op.keys)
        return answers

    def drop_client(self, client: Client) -> None:
        """Forget the requests of ``client`` that wait; its keys stay."""
        for serial in [s for s, waiter in self._waiters.items() if waiter.client == client]:
            self._forget(serial)

    def drop_prefix(self, prefix: str) -> list[DueAnswer[Client]]:
        """Delete the keys that start with ``prefix``; clients that wait for such a key are answered with an error."""
        for key in [key for key in self._values if key.startswith(prefix)]:
            del self._values[key]
        answers = []
        for serial, waiter in list(self._waiters.items()):
            if any(key.startswith(prefix) for key in waiter.op.keys):
                self._forget(serial)
                error = StoreResult(error=f'keys under "{prefix}" were dropped: the group they belong to has ended')
                answers.append((waiter.client, waiter.request_id, error))
        return answers

    # ---- waiting ------------------------------------------------------------------------------------------------

    def _is_complete(self, waiter: _Waiter[Client]) -> bool:
        waiter.missing = {key for key in waiter.op.keys if key not in self._values}
        return not waiter.missing

    def _await(self, serial: int, waiter: _Waiter[Client]) -> None:
        for key in waiter.missing:
            self._by_key.setdefault(key, []).append(serial)

    def _answer(self, waiter: _Waiter[Client]) -> DueAnswer[Client]:
        wants_values = waiter.op.op != "wait"
        values = tuple(self._values[key] for key in waiter.op.keys) if wants_values else ()
        return waiter.client, waiter.request_id, StoreResult(values=values)

    def _wake(self, keys: tuple[str, ...]) -> list[DueAnswer[Client]]:
        """Answer the waiters that ``keys``, just stored, complete; in the order in which they came."""
        touched: set[int] = set()
        for key in keys:
            for serial in self._by_key.pop(key, ()):
                if (waiter := self._waiters.get(serial)) is not None:
                    waiter.missing.discard(key)
                    touched.add(serial)
        answers = []
        for serial in sorted(touched):
            waiter = self._waiters[serial]
            if waiter.missing:
                continue
            if self._is_complete(waiter):
                del self._waiters[serial]
                answers.append(self._answer(waiter))
            else:  # a key that it had seen was deleted meanwhile
                self._await(serial, waiter)
        return answers

    def _forget(self, serial: int) -> None:
        for key in self._waiters.pop(serial).missing:
            others = [other for other in self._by_key.get(key, ()) if other != serial]
            if others:
                self._by_key[key] = others
            else:
                self._by_key.pop(key, None)

    # ---- operations -------------------------------------------------------------------------------------------------

    def _carry_out(self, client: Client, op: StoreOp) -> tuple[StoreResult, bool]:
        """Carry out an operation that waits for nothing; return its result and whether keys may have appeared."""
        values = self._values
        match op.op:
            case "set" | "multi_set":
                values.update(zip(op.keys, op.values, strict=True))
                return _DONE, True
            case "append":
                for key, value in zip(op.keys, op.values, strict=True):
                    values[key] = values.get(key, b"") + value
                return _DONE, True
            case "add":
                return self._add(op.keys[0], op.amount)
            case "compare_set":
                return self._compare_set(op.keys[0], *op.values)
            case "check":
                number = int(all(key in values for key in op.keys))
            case "delete":
                number = sum(values.pop(key, None) is not None for key in op.keys)
            case "num_keys":
                number = len(values)
            case "list_keys":
                return StoreResult(values=tuple(key.encode() for key in values)), False
            case "cancel":
                found = [s for s, w in self._waiters.items() if w.client == client and w.op.token == op.token]
                for serial in found:
                    self._forget(serial)
                number = len(found)
            case other:
                raise AssertionError(f"{other} waits for keys")
        return StoreResult(number=number), False

    def _add(self, key: str, amount: int) -> tuple[StoreResult, bool]:
        try:
            total = int(self._values.get(key, b"0")) + amount
        except ValueError:
            return StoreResult(error=f'add: "{key}" does not hold a number'), False
        self._values[key] = b"%d" % total
        return StoreResult(number=total), True

    def _compare_set(self, key: str, expected: bytes, desired: bytes) -> tuple[StoreResult, bool]:
        """Compare and set as TCPStore does: a missing key equals an empty ``expected``, else is reported as it."""
        current = self._values.get(key)
        if current == expected or (current is None and not expected):
            self._values[key] = desired
            return StoreResult(values=(desired,)), True
        return StoreResult(values=(expected if current is None else current,)), False


_ONE_KEY = frozenset({"get", "add", "compare_set"})
_VALUE_PER_KEY = frozenset({"set", "multi_set", "append"})


def _mistake(op: StoreOp) -> str:
    """Return why ``op`` cannot be carried out; empty if it can."""
    if op.op in _ONE_KEY and len(op.keys) != 1:
        return f"{op.op}: one key is needed, {len(op.keys)} came"
    if op.op in _VALUE_PER_KEY and len(op.keys) != len(op.values):
        return f"{op.op}: {len(op.keys)} keys came with {len(op.values)} values"
    if op.op == "compare_set" and len(op.values) != 2:
        return f"compare_set: an expected and a new value are needed, {len(op.values)} came"
    return ""
