"""The store of process groups on the agents: one home, roads to it, and questions that are asked again."""

from __future__ import annotations

from patience import wait_until

from meshbook import ProcMesh
from meshbook.agent.store import StoreHome, StoreRelay
from meshbook.wire import messages as wire
from meshbook.wire.kv_store import StoreOp, StoreResult


class Side:
    """What an agent would send: to its workers (ranks below ``ranks``) and to the controller."""

    def __init__(self, ranks: int) -> None:
        self.ranks = ranks
        self.delivered: list[tuple[int, wire.StoreAnswer]] = []
        self.sent: list[wire.FromHost] = []

    def deliver(self, rank: int, answer: wire.StoreAnswer) -> bool:
        if rank < self.ranks:
            self.delivered.append((rank, answer))
        return rank < self.ranks


def _home(ranks: int = 2) -> tuple[StoreHome, Side]:
    side = Side(ranks)
    return StoreHome(7, side.deliver, side.sent.append), side


def test_a_question_that_comes_twice_counts_once() -> None:
    home, side = _home()
    for _ in range(2):
        home.on_message(wire.StoreRequest(7, 3, 1, StoreOp("add", ("n",), amount=5)))
    home.ask(0, 1, StoreOp("get", ("n",)))
    assert [answer.result.number for answer in side.sent if isinstance(answer, wire.StoreAnswer)] == [5, 5]
    assert side.delivered == [(0, wire.StoreAnswer(7, 0, 1, StoreResult(values=(b"5",))))]


def test_a_waiting_question_that_comes_twice_is_answered_once() -> None:
    home, side = _home()
    for _ in range(2):
        home.on_message(wire.StoreRequest(7, 3, 1, StoreOp("get", ("key",), token=9)))
    assert not side.sent
    home.ask(1, 1, StoreOp("set", ("key",), (b"v",)))
    assert side.sent == [wire.StoreAnswer(7, 3, 1, StoreResult(values=(b"v",)))]


def test_a_rank_that_comes_after_a_dead_one_gets_answers_of_its_own() -> None:
    home, side = _home()
    home.on_message(wire.StoreRequest(7, 3, 1, StoreOp("add", ("n",), amount=5)))
    home.drop_client(3)
    home.on_message(wire.StoreRequest(7, 3, 1, StoreOp("add", ("n",), amount=5)))
    assert [answer.result.number for answer in side.sent if isinstance(answer, wire.StoreAnswer)] == [5, 10]


def test_a_road_asks_again_what_has_no_answer() -> None:
    side = Side(4)
    router = StoreRelay(7, side.deliver, side.sent.append)
    router.ask(2, 1, StoreOp("check", ("a",)))
    router.ask(2, 2, StoreOp("get", ("b",)))
    router.on_message(wire.StoreAnswer(7, 2, 1, StoreResult(number=1)))
    router.on_message(wire.StoreAnswer(7, 2, 1, StoreResult(number=1)))
    side.sent.clear()
    router.on_message(wire.AskAgain(7))
    assert side.sent == [wire.StoreRequest(7, 2, 2, StoreOp("get", ("b",)))]
    assert side.delivered == [(2, wire.StoreAnswer(7, 2, 1, StoreResult(number=1)))]


def test_a_lost_home_answers_whoever_waits_and_whoever_asks_later() -> None:
    side = Side(4)
    router = StoreRelay(7, side.deliver, side.sent.append)
    router.ask(2, 1, StoreOp("get", ("b",)))
    router.on_message(wire.StoreLost(7, "host a is lost"))
    router.ask(3, 1, StoreOp("get", ("b",)))
    assert [(rank, answer.result.error) for rank, answer in side.delivered] == [
        (2, "the store of the process groups is gone: host a is lost"),
        (3, "the store of the process groups is gone: host a is lost"),
    ]


_STORE = "from torch.distributed.distributed_c10d import _get_default_store; store = _get_default_store()"


def test_ranks_of_all_hosts_share_one_store_whose_keys_can_be_dropped(mesh2x2: ProcMesh) -> None:
    mesh2x2.run(_STORE).get(60)
    assert sorted(mesh2x2.run("store.add('shared', 1)").get(60).values()) == [1, 2, 3, 4]
    keys = mesh2x2.run("[key for key in store._underlying_non_prefix_store.list_keys() if 'shared' in key]").get(60)
    (key,) = keys.values()[3]
    controller = mesh2x2._controller
    mesh = mesh2x2._mesh
    controller.ask(lambda: mesh.store_host.send_urgent(wire.DropKeys(mesh.id, key)))
    wait_until(lambda: not any(mesh2x2.run("store.check(['shared'])").get(60).values()))
    mesh2x2.run("dist.barrier()").get(60)
