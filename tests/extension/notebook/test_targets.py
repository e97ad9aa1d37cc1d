"""Targets against NumPy indexing, and the answers to targets that make no sense."""

from __future__ import annotations

from typing import Any, cast

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from meshbook.errors import RankError, UsageError
from meshbook.mesh.proc_mesh import ProcMesh
from meshbook.shape.members import Members, Region
from meshbook_extension.notebook.targets import choose, parse_selector


class View:
    """The part of ProcMesh that targets need, over the real shape algebra."""

    def __init__(self, members: Members) -> None:
        self.members = members

    @property
    def sizes(self) -> dict[str, int]:
        return self.members.sizes

    @property
    def ranks(self) -> tuple[int, ...]:
        return tuple(self.members.ranks())

    def slice(self, **axes: Any) -> View:
        return View(self.members.slice(**axes))

    def select(self, ranks: Any) -> View:
        return View(self.members.select(ranks))


def view(**sizes: int) -> ProcMesh:
    return cast(ProcMesh, View(Region.of(sizes)))


def ranks(procs: ProcMesh, line: str) -> tuple[int, ...]:
    return choose(procs, dict(part.split("=", 1) for part in line.split())).ranks


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ("", (0, 1, 2, 3, 4, 5, 6, 7)),
        ("hosts=1", (4, 5, 6, 7)),
        ("gpus=0", (0, 4)),
        ("gpus=-1", (3, 7)),
        ("gpus=1:3", (1, 2, 5, 6)),
        ("gpus=:", (0, 1, 2, 3, 4, 5, 6, 7)),
        ("gpus=::2", (0, 2, 4, 6)),
        ("gpus=-2:", (2, 3, 6, 7)),
        ("gpus=0,3", (0, 3, 4, 7)),
        ("gpus=3,0", (0, 3, 4, 7)),
        ("gpus=0,-1", (0, 3, 4, 7)),
        ("gpus=0,2:4", (0, 2, 3, 4, 6, 7)),
        ("gpus=0-2", (0, 1, 2, 4, 5, 6)),
        ("hosts=1 gpus=0:2", (4, 5)),
        ("rank=5", (5,)),
        ("rank=-1", (7,)),
        ("rank=0,5", (0, 5)),
        ("rank=0-2,5", (0, 1, 2, 5)),
        ("rank=::3", (0, 3, 6)),
        ("hosts=1 rank=:6", (4, 5)),
    ],
)
def test_a_target_names_ranks(line: str, expected: tuple[int, ...]) -> None:
    assert ranks(view(hosts=2, gpus=4), line) == expected


def test_an_index_drops_its_axis_and_others_keep_theirs() -> None:
    procs = view(hosts=2, gpus=4)
    assert choose(procs, {"hosts": "1"}).sizes == {"gpus": 4}
    assert choose(procs, {"hosts": "1:2"}).sizes == {"hosts": 1, "gpus": 4}
    assert choose(procs, {"gpus": "0,3"}).sizes == {"hosts": 2, "gpus": 2}
    assert choose(procs, {"rank": "0,3"}).sizes == {"rank": 2}


def test_rank_means_base_ranks_also_in_a_view() -> None:
    right = choose(view(hosts=2, gpus=4), {"gpus": "2:4"})
    assert right.ranks == (2, 3, 6, 7)
    assert ranks(right, "rank=6") == (6,)
    evens = choose(view(gpus=8), {"rank": "0,2,4"})
    assert evens.sizes == {"rank": 3}
    assert ranks(evens, "rank=2") == (2,)
    with pytest.raises(UsageError, match=r"rank 1 is not in this target, which has ranks 0,2,4\."):
        ranks(evens, "rank=1")
    with pytest.raises(UsageError, match=r"ranks 0,1 are not in this target, which has ranks 2,3,6,7\."):
        ranks(right, "rank=:2")


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("gpus=4", "gpus=4 selects nothing; gpus runs from 0 to 3."),
        ("gpus=-5", "gpus=-5 selects nothing; gpus runs from 0 to 3."),
        ("gpus=2:2", "gpus=2:2 selects nothing; gpus runs from 0 to 3."),
        ("gpus=0,9", "gpus=9 selects nothing; gpus runs from 0 to 3."),
        ("rank=8", "rank=8 selects nothing; rank runs from 0 to 7."),
    ],
)
def test_a_target_that_selects_nothing_is_answered_with_the_range(line: str, message: str) -> None:
    with pytest.raises(RankError) as caught:
        ranks(view(hosts=2, gpus=4), line)
    assert str(caught.value) == message


@pytest.mark.parametrize("text", ["x", "0.5", "1;2", "", "0:1:2:3", "1--2", "range(2)"])
def test_what_is_no_index_is_answered_with_the_forms(text: str) -> None:
    with pytest.raises(UsageError, match=r"Write gpus=0, gpus=0:2, gpus=0,2 or gpus=: \(all of it\)"):
        parse_selector("gpus", text, 4)


def test_a_step_is_at_least_one() -> None:
    with pytest.raises(UsageError, match="the step is at least 1"):
        parse_selector("gpus", "::-1", 4)


BOUND = st.none() | st.integers(-12, 12)


@given(size=st.integers(1, 10), start=BOUND, stop=BOUND, step=st.none() | st.integers(1, 4))
def test_slices_choose_what_numpy_would(size: int, start: int | None, stop: int | None, step: int | None) -> None:
    text = ":".join("" if bound is None else str(bound) for bound in (start, stop, step))
    expected = tuple(np.arange(size)[start:stop:step])
    if expected:
        assert ranks(view(gpus=size), f"gpus={text}") == expected
        assert ranks(view(gpus=size), f"rank={text}") == expected
    else:
        with pytest.raises(RankError):
            parse_selector("gpus", text, size)
