"""Process groups on real ranks: formed, used by cells, taken down."""

from __future__ import annotations

import re
from collections.abc import Iterator

import pytest
from forked_ranks import Ranks

from meshbook.wire.kv_store import StoreOp


@pytest.fixture(scope="module")
def ranks() -> Iterator[Ranks]:
    ranks = Ranks()
    yield ranks
    ranks.close()


@pytest.mark.slow
def test_importing_starts_no_thread_and_opens_no_socket(ranks: Ranks) -> None:
    threads, sockets = ranks.threads_and_sockets
    assert (threads, sockets) == (b"1", b"1")  # the socket that it was given


# ---- forming ---------------------------------------------------------------------------------------------------------


def test_a_formed_group_works_and_ranks_have_torchruns_variables(ranks: Ranks) -> None:
    results = ranks.run("world")
    assert [result["count"] for result in results] == [4.0] * 4
    assert [result["evens"] for result in results] == [2.0, 1.0, 2.0, 3.0]
    assert all(result["excepthook kept"] and result["axes"] == ("gpus",) for result in results)
    assert {result["backend"] for result in results} == {"gloo"}
    assert any(result["threads of C++ asked the store"] for result in results)
    for rank, environment in enumerate(result["environment"] for result in results):
        assert (environment["RANK"], environment["LOCAL_RANK"], environment["GROUP_RANK"]) == (str(rank),) * 2 + ("0",)
        assert environment["WORLD_SIZE"] == environment["LOCAL_WORLD_SIZE"] == "4"
    masters = {(r["environment"]["MASTER_ADDR"], r["environment"]["MASTER_PORT"]) for r in results}
    ((address, port),) = masters
    assert address == "127.0.0.1" and 0 < int(port) < 65536


def test_a_group_of_one_forms(ranks: Ranks) -> None:
    assert ranks.run("without_a_group", size=1)[0][2:] == (1.0, 1)


def test_gloo_may_also_connect_at_once(ranks: Ranks) -> None:
    assert ranks.run("eager_gloo") == [(4.0, 1)] * 4


def test_a_rank_that_does_not_come_is_named(ranks: Ranks) -> None:
    errors = ranks.run("missing_rank")
    assert re.search(r"ranks? ([\d,-]*,)?2(,3)? did not come", errors[0]), errors[0]  # others may be late as well
    assert all("did not form" in errors[rank] for rank in (0, 1, 3))


def test_a_rank_lost_before_the_proof_fails_the_others_in_time(ranks: Ranks) -> None:
    errors = ranks.run("rank_lost_before_the_proof")
    assert all("the process group did not form" in errors[rank] for rank in (0, 2, 3)), errors
    assert any("first collective took more than 2 s" in error for error in errors), errors


def test_forming_can_be_interrupted_and_done_again(ranks: Ranks) -> None:
    assert ranks.run("interrupted_then_formed") == [4.0] * 4
    assert ranks.store.waiting == 0


def test_under_a_new_epoch_groups_are_formed_again_in_place(ranks: Ranks) -> None:
    for stale, counted, total, is_same_mesh in ranks.run("formed_again"):
        assert "epoch 3 is not newer than epoch 3" in stale
        assert (counted, total, is_same_mesh) == (4.0, 28.0, True)
    ranks.store.drop_prefix("epoch3/")
    keys = ranks.store.request(0, 1, StoreOp("list_keys"))[0][2].values
    assert keys and all(key.startswith(b"epoch4/") for key in keys)


def test_closing_twice_leaves_no_group(ranks: Ranks) -> None:
    for initialized, error, value in ranks.run("closed", size=2):
        assert not initialized and value == b"v"
        assert "there is no process group on this rank" in error


# ---- device meshes, and what is built on them ------------------------------------------------------------------------


def test_a_mesh_of_two_axes_has_a_group_per_axis(ranks: Ranks) -> None:
    for rank, got in enumerate(ranks.run("two_axes")):
        row, column = divmod(rank, 2)
        assert got["coordinate"] in ((row, column), [row, column])
        assert got["sums"] == {"dp": 2.0 * column + 2, "tp": 4.0 * row + 1}
        assert got["shares groups"] and got["flat is the world"] and got["same object"] and got["flattened"] == 4
        assert "a=2, b=3 is no layout of 4 ranks" in got["wrong sizes"]


# ---- what cells do to the default group ------------------------------------------------------------------------------


def test_init_process_group_in_a_cell_uses_the_group_of_the_mesh(ranks: Ranks) -> None:
    for got in ranks.run("init_in_a_cell"):
        assert got["kept"] and got["count"] == 4.0 and got["mesh"] and got["documented"]
        assert "uses gloo, not nccl" in got["nccl"] and "dist.destroy_process_group()" in got["nccl"]
        assert "with world_size=4" in got["smaller"]
        assert got["notes"] == "init_process_group: the process group of this mesh (4 ranks) is used; nothing to do\n"


def test_a_cell_may_destroy_the_group_and_make_it_again(ranks: Ranks) -> None:
    results = ranks.run("destroyed_and_made_again_in_a_cell")
    assert results[:2] == [[4.0, 4.0, 4.0, 2.0, 4.0]] * 2 and results[2:] == [[4.0] * 4] * 2


def test_a_cell_may_bring_its_own_store_or_port(ranks: Ranks) -> None:
    assert ranks.run("own_rendezvous") == [(4.0, 4.0)] * 4


def test_without_a_group_a_cell_makes_one(ranks: Ranks) -> None:
    for initialized, error, counted, size in ranks.run("without_a_group"):
        assert not initialized and "there is no process group" in error
        assert (counted, size) == (4.0, 4)


def test_init_that_only_some_ranks_ran_can_be_interrupted_and_run_by_all(ranks: Ranks) -> None:
    assert ranks.run("interrupted_init_in_a_cell") == [4.0] * 4
    assert ranks.store.waiting == 0


# ---- the store, values, whereabouts ----------------------------------------------------------------------------------


def test_torch_finds_all_of_a_store_behind_the_link(ranks: Ranks) -> None:
    for same, got, late, is_copy_itself, closed in ranks.run("store_operations", size=2):
        assert same and is_copy_itself
        assert got == (
            b"vw",
            [b"2", b"1"],
            (5, 3, b"3"),
            (True, False),
            (b"new", b"new"),
            (True, False, False),
            True,
            True,
            None,
            True,
        )
        assert "wait timeout after 0.1 s, keys: p/never" in late
        assert "this store was closed" in closed
    assert ranks.store.waiting == 0


def test_a_store_that_nobody_keeps_stays_alive(ranks: Ranks) -> None:
    assert ranks.run("collected_store", size=2) == [b"v", b"v"]


def test_values_of_all_kinds_reach_all_ranks(ranks: Ranks) -> None:
    assert ranks.run("values") == [("hello", 4, [1, 2, {"lr": 0.1}])] * 4


def test_a_value_that_cannot_be_had_is_an_error_on_every_rank(ranks: Ranks) -> None:
    for value, (misspelt, unpicklable, no_such_rank, no_group) in ranks.run("values_that_cannot_be_had"):
        assert value == 0.1
        assert 'there is no "learning_rte" on rank 1. Did you mean "learning_rate"?' in misspelt
        assert unpicklable.startswith("lock is a ") and "cannot be sent" in unpicklable
        assert "there is no rank 9" in no_such_rank and "there is no process group" in no_group
