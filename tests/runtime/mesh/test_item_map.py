"""`ProcMesh.map`: items go to the ranks that are free."""

from __future__ import annotations

import os
import pickle
import signal
import threading
import time
from pathlib import Path

import pytest
from patience import kill, wait_until

from meshbook import ProcMesh
from meshbook.errors import CallInterrupted, ItemFailed, UsageError
from meshbook.mesh import states
from meshbook.mesh.driven import set_front_end


def rank_of(item: float) -> tuple[float, int]:
    time.sleep(item)
    return item, int(os.environ["RANK"])


def half(item: int) -> float:
    if item == 5:
        raise ValueError("odd one")
    return item / 2


def test_results_come_in_the_order_of_the_items_from_ranks_that_are_free(mesh4: ProcMesh) -> None:
    items = [3.0, *([0.01] * 20)]
    found = mesh4.map(rank_of, items)
    assert [item for item, _ in found] == items
    by_rank = {rank: sum(1 for _, its in found if its == rank) for _, rank in found}
    assert by_rank[found[0][1]] < 10, "the rank with the slow item had fewer of the others"
    assert len(by_rank) == 4
    assert mesh4.map(half, range(0)) == []
    assert mesh4.slice(gpus=1).map(rank_of, iter([0, 0])) == [(0, 1), (0, 1)]


def test_an_error_names_the_item_and_its_rank_and_keeps_what_is_done(mesh4: ProcMesh) -> None:
    with pytest.raises(ItemFailed, match=r"^item 5 \(5\): rank \d raised ValueError: odd one") as caught:
        mesh4.map(half, range(100))
    assert caught.value.index == 5 and caught.value.partial[0] == 0.0
    lines = caught.value._render_traceback_()
    assert lines[0] == "item 5 (5):" and lines[-1].endswith("items are done; their results: error.partial")
    copy = pickle.loads(pickle.dumps(caught.value))
    assert (copy.index, copy.item, copy.partial) == (5, "5", caught.value.partial)
    assert not states.busy(mesh4)


def test_errors_may_be_results(mesh4: ProcMesh) -> None:
    found = mesh4.map(half, range(8), return_exceptions=True)
    assert isinstance(found[5], ItemFailed) and [each for each in found if each is not found[5]] == [
        0, 0.5, 1, 1.5, 2, 3, 3.5
    ]  # fmt: skip


def test_a_function_is_wanted(mesh4: ProcMesh) -> None:
    with pytest.raises(UsageError, match=r"procs\.map\(fn, items\)"):
        mesh4.map(3, [1])  # type: ignore[arg-type]


def test_a_mesh_whose_ranks_have_ended_says_so(mesh2: ProcMesh) -> None:
    for rank in (0, 1):
        kill(mesh2, rank)
    wait_until(lambda: len(mesh2.lost) == 2, 30)
    with pytest.raises(UsageError, match="all of ranks 0,1 have ended"):
        mesh2.map(half, [1])
    assert mesh2.map(half, []) == []


def test_the_progress_is_shown_and_taken_away(mesh4: ProcMesh) -> None:
    texts: list[str] = []
    set_front_end(show_progress=texts.append)
    try:
        mesh4.map(rank_of, [0.2] * 12)
    finally:
        set_front_end()
    assert texts[-1] == ""
    shown = [text for text in texts if text]
    assert shown and all(text.startswith("rank_of ") and "/12" in text for text in shown), texts


def end_once(item: int, path: str) -> int:
    """End the process at item 3, the first time."""
    if item == 3 and not Path(path).exists():
        Path(path).touch()
        os.kill(os.getpid(), signal.SIGKILL)
    return item


def test_the_item_of_a_rank_that_dies_goes_to_another_one(
    mesh2: ProcMesh, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    path = str(tmp_path / "ended")
    assert mesh2.map(lambda item: end_once(item, path), range(6)) == list(range(6))
    said = capfd.readouterr().err
    assert "killed by SIGKILL" in said and "its item 3 (3) goes to another rank" in said
    assert len(mesh2.lost) == 1


def end(item: int) -> int:
    if item == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    time.sleep(0.3)
    return item


def test_an_item_that_ends_two_ranks_fails(mesh4: ProcMesh) -> None:
    try:
        found = mesh4.map(end, range(4), return_exceptions=True)
        assert isinstance(found[1], ItemFailed) and "killed by SIGKILL" in str(found[1])
        assert [found[0], found[2], found[3]] == [0, 2, 3] and len(mesh4.lost) == 2
    finally:
        mesh4.heal()


def test_an_interrupt_frees_the_ranks_and_keeps_what_is_done(mesh4: ProcMesh) -> None:
    texts: list[str] = []

    def press() -> None:
        wait_until(lambda: any(" 1/6" in text for text in texts), 60)
        os.kill(os.getpid(), signal.SIGINT)

    presser = threading.Thread(target=press)
    presser.start()
    set_front_end(show_progress=texts.append)
    try:
        with pytest.raises(CallInterrupted) as caught:
            mesh4.map(rank_of, [0.0, *([60.0] * 5)])
    finally:
        set_front_end()
        presser.join()
    assert caught.value.partial[0][0] == 0.0 and 1 not in caught.value.partial
    wait_until(lambda: not states.busy(mesh4), 30)
    assert mesh4.map(half, [1]) == [0.5]
