"""The server side of the store: what is answered, when, and to whom."""

from __future__ import annotations

import itertools
from collections.abc import Iterable

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from meshbook.wire.kv_store import KeyValueStore, StoreOp, StoreResult

KEYS = ("a", "b", "c")


class Clients:
    """Clients of one store; keeps what each request was answered with."""

    def __init__(self) -> None:
        self.store: KeyValueStore[str] = KeyValueStore()
        self.answers: dict[int, StoreResult] = {}
        self.order: list[int] = []
        self._ids = itertools.count(1)

    def ask(self, op: str, keys: Iterable[str] = (), *values: bytes, client: str = "rank 0", **fields: int) -> int:
        request = next(self._ids)
        self.note(self.store.request(client, request, StoreOp(op, tuple(keys), values, **fields)))  # type: ignore[arg-type]
        return request

    def note(self, due: list[tuple[str, int, StoreResult]]) -> None:
        for _, request, result in due:
            assert request not in self.answers, "a request was answered twice"
            self.answers[request] = result
            self.order.append(request)

    def result(self, op: str, keys: Iterable[str] = (), *values: bytes, **fields: int) -> StoreResult:
        return self.answers[self.ask(op, keys, *values, **fields)]


@pytest.fixture
def clients() -> Clients:
    return Clients()


def test_get_is_answered_by_the_set_that_it_waits_for(clients: Clients) -> None:
    get = clients.ask("get", ["k"], client="rank 1")
    assert get not in clients.answers and clients.store.waiting == 1
    put = clients.ask("set", ["k"], b"v")
    assert clients.order == [put, get] and clients.answers[get].values == (b"v",)
    assert clients.store.waiting == 0


def test_those_who_wait_for_a_key_are_answered_in_the_order_in_which_they_came(clients: Clients) -> None:
    gets = [clients.ask("get", ["k"], client=f"rank {rank}") for rank in (3, 1, 2)]
    put = clients.ask("set", ["k"], b"v")
    assert clients.order == [put, *gets]


def test_wait_and_multi_get_need_all_their_keys(clients: Clients) -> None:
    wait, get = clients.ask("wait", ["a", "b"]), clients.ask("multi_get", ["b", "a"])
    clients.ask("set", ["b"], b"2")
    assert not {wait, get} & clients.answers.keys()
    clients.ask("multi_set", ["a", "c"], b"1", b"3")
    assert clients.answers[wait] == StoreResult() and clients.answers[get].values == (b"2", b"1")


def test_a_key_deleted_while_others_are_awaited_is_awaited_again(clients: Clients) -> None:
    get = clients.ask("multi_get", ["a", "b"])
    clients.ask("set", ["a"], b"old")
    clients.ask("delete", ["a"])
    clients.ask("set", ["b"], b"2")
    assert get not in clients.answers
    clients.ask("set", ["a"], b"new")
    assert clients.answers[get].values == (b"new", b"2")


def test_no_keys_are_there_at_once(clients: Clients) -> None:
    assert clients.result("wait") == StoreResult() and clients.result("multi_get").values == ()
    assert clients.result("check").number == 1


def test_add_counts_in_decimal_text(clients: Clients) -> None:
    assert [clients.result("add", ["n"], amount=amount).number for amount in (3, -5, 0)] == [3, -2, -2]
    assert clients.result("get", ["n"]).values == (b"-2",)
    clients.ask("set", ["n"], b"40")
    assert clients.result("add", ["n"], amount=2).number == 42


def test_add_to_text_is_an_error_and_changes_nothing(clients: Clients) -> None:
    clients.ask("set", ["n"], b"many")
    assert "does not hold a number" in clients.result("add", ["n"], amount=1).error
    assert clients.result("get", ["n"]).values == (b"many",)


@pytest.mark.parametrize(
    ("before", "expected", "answer", "after"),
    [
        (b"a", b"a", b"new", b"new"),
        (b"a", b"b", b"a", b"a"),
        (None, b"", b"new", b"new"),
        (None, b"b", b"b", None),
    ],
)
def test_compare_set_does_as_tcpstore(
    clients: Clients, before: bytes | None, expected: bytes, answer: bytes, after: bytes | None
) -> None:
    if before is not None:
        clients.ask("set", ["k"], before)
    assert clients.result("compare_set", ["k"], expected, b"new").values == (answer,)
    assert clients.result("check", ["k"]).number == (after is not None)
    if after is not None:
        assert clients.result("get", ["k"]).values == (after,)


def test_compare_set_that_makes_a_key_wakes_who_waits_for_it(clients: Clients) -> None:
    get = clients.ask("get", ["k"])
    clients.ask("compare_set", ["k"], b"", b"v")
    assert clients.answers[get].values == (b"v",)


def test_keys_are_counted_listed_and_deleted(clients: Clients) -> None:
    clients.ask("multi_set", ["a", "b", "ü"], b"", b"", b"")
    assert clients.result("num_keys").number == 3
    assert clients.result("list_keys").values == (b"a", b"b", "ü".encode())
    assert clients.result("delete", ["a", "nothing", "b"]).number == 2
    assert clients.result("num_keys").number == 1


def test_cancel_forgets_the_one_request_of_that_client(clients: Clients) -> None:
    mine = clients.ask("get", ["k"], client="rank 1", token=7)
    kept = clients.ask("get", ["k"], client="rank 1", token=8)
    other = clients.ask("get", ["k"], client="rank 2", token=7)
    cancel = clients.ask("cancel", client="rank 1", token=7)
    assert clients.answers[cancel].number == 1
    clients.ask("set", ["k"], b"v")
    assert mine not in clients.answers and {kept, other} <= clients.answers.keys()


def test_a_client_that_left_is_not_answered_and_its_keys_stay(clients: Clients) -> None:
    clients.ask("set", ["mine"], b"1", client="rank 1")
    gone, there = clients.ask("get", ["k"], client="rank 1"), clients.ask("get", ["k"], client="rank 2")
    clients.store.drop_client("rank 1")
    clients.ask("set", ["k"], b"v")
    assert gone not in clients.answers and there in clients.answers
    assert clients.result("check", ["mine"]).number == 1


def test_dropping_a_prefix_deletes_its_keys_and_fails_who_waits_for_them(clients: Clients) -> None:
    clients.ask("multi_set", ["epoch1/a", "epoch11/a"], b"old", b"kept")
    stuck, unrelated = clients.ask("get", ["epoch1/b"]), clients.ask("get", ["epoch2/b"])
    clients.note(clients.store.drop_prefix("epoch1/"))
    assert "were dropped" in clients.answers[stuck].error and unrelated not in clients.answers
    assert clients.result("list_keys").values == (b"epoch11/a",)


@pytest.mark.parametrize(
    "op",
    [
        StoreOp("get", ("a", "b")),
        StoreOp("add"),
        StoreOp("set", ("a",)),
        StoreOp("multi_set", ("a", "b"), (b"1",)),
        StoreOp("compare_set", ("a",), (b"1",)),
    ],
)
def test_a_request_that_makes_no_sense_is_answered_with_an_error(op: StoreOp) -> None:
    store: KeyValueStore[int] = KeyValueStore()
    ((client, request, result),) = store.request(4, 9, op)
    assert (client, request) == (4, 9) and result.error.startswith(op.op)
    assert len(store) == 0 and store.waiting == 0


def test_an_unknown_op_does_not_travel() -> None:
    with pytest.raises(msgspec.ValidationError):
        msgspec.msgpack.decode(msgspec.msgpack.encode(["steal", []]), type=StoreOp)


# ---- orderings -------------------------------------------------------------------------------------------------------

steps = st.lists(
    st.one_of(
        st.tuples(st.just("add"), st.sampled_from(KEYS), st.integers(-3, 3)),
        st.tuples(st.just("wait"), st.sets(st.sampled_from(KEYS), min_size=1), st.just(0)),
        st.tuples(st.just("delete"), st.sampled_from(KEYS), st.just(0)),
    ),
    max_size=30,
)


@given(steps)
def test_whatever_the_order_waiters_are_answered_exactly_when_their_keys_are_there(steps: list[tuple]) -> None:  # type: ignore[type-arg]
    clients = Clients()
    totals: dict[str, int] = {}
    waiting: dict[int, set[str]] = {}
    for op, keys, amount in steps:
        if op == "wait":
            request = clients.ask("wait", sorted(keys))
            waiting[request] = set(keys)
        elif op == "add":
            totals[keys] = totals.get(keys, 0) + amount
            assert clients.result("add", [keys], amount=amount).number == totals[keys]
        else:
            assert clients.result("delete", [keys]).number == (keys in totals)
            totals.pop(keys, None)
        for request, wanted in list(waiting.items()):
            assert (request in clients.answers) == (wanted <= totals.keys())
            if request in clients.answers:
                del waiting[request]
    assert clients.store.waiting == len(waiting)
