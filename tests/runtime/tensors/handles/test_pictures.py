"""A notebook shows which rank holds which block of a mesh tensor, and of a tensor that is gone why."""

from __future__ import annotations

import re
from xml.etree import ElementTree

import pytest
import torch

import meshbook
from meshbook import ProcMesh, this_host
from meshbook.distributed import Mesh
from meshbook.tensors.handles.displays import draw, not_drawn


def labels(shown: str) -> list[str]:
    picture = ElementTree.fromstring(shown[shown.index("<svg") : shown.index("</svg>") + 6])
    said = [each.text or "" for each in picture.iter("title")]
    assert picture.attrib["aria-label"] == "; ".join(said)
    return said


@pytest.mark.parametrize(
    ("spec", "blocks", "held"),
    [
        (None, ["ranks 0-3: [0:5, 0:7]"], "140 B per rank"),
        (["dp", None], ["ranks 0,1: [0:3, 0:7]", "ranks 2,3: [3:5, 0:7]"], "56 B to 84 B per rank"),
        (
            ["tp", "dp"],
            ["rank 0: [0:3, 0:4]", "rank 1: [3:5, 0:4]", "rank 2: [0:3, 4:7]", "rank 3: [3:5, 4:7]"],
            "24 B to 48 B per rank",
        ),
    ],
    ids=str,
)
def test_the_picture_has_a_block_for_each_part(
    square: ProcMesh, spec: list[str | None], blocks: list[str], held: str
) -> None:
    x = meshbook.distribute(torch.ones(5, 7), Mesh(square), spec)
    shown = x._repr_html_()
    assert labels(shown) == blocks and held in shown
    assert "(5, 7) torch.float32" in shown and "[1., 1., 1., 1., 1., 1., 1.]" in shown
    assert len(set(re.findall(r"hsl\([^)]*\)", shown))) == len(blocks)


def test_tensors_of_any_number_of_dims_are_drawn(square: ProcMesh) -> None:
    mesh = Mesh(square)
    assert labels(meshbook.zeros(6, mesh=mesh, sharding_spec=["tp"])._repr_html_()) == [
        "ranks 0,2: [0:3]",
        "ranks 1,3: [3:6]",
    ]
    assert "<svg" not in meshbook.zeros((), mesh=mesh)._repr_html_()
    shown = meshbook.zeros(2, 4, 6, mesh=mesh, sharding_spec=[None, "dp", "tp"])._repr_html_()
    assert labels(shown)[1] == "rank 1: [0:2, 3:6]" and "dims [1, 2] of 3" in shown
    assert "<svg" not in meshbook.zeros(0, 4, mesh=mesh)._repr_html_()


def test_what_is_not_drawn_is_said() -> None:
    cubes = {rank: tuple((at, at + 1) for at in (rank // 4, rank // 2 % 2, rank % 2)) for rank in range(8)}
    assert not_drawn(cubes, [0, 1, 2], [0, 1]) == ["cut along dim 2 as well, which is not drawn"]
    assert labels(draw(cubes, (2, 2, 2), [0, 1]))[0] == "ranks 0,1: [0:1, 0:1]"
    rows = {rank: ((rank, rank + 1),) for rank in range(300)}
    assert not_drawn(rows, [0], [0]) == ["the first 256 of 300 blocks are drawn"]
    assert len(labels(draw(rows, (300,), [0]))) == 256
    assert not_drawn({0: ((0, 2),), 1: ((2, 4),)}, [0], [0]) == []


def test_a_tensor_of_a_mesh_that_has_ended_shows_why(clean_end: None) -> None:
    with this_host().spawn_procs({"gpus": 2}, name="ended") as procs:
        x = meshbook.distribute(torch.ones(4), Mesh(procs))
    shown = x._repr_html_()
    assert "its values are not there" in shown and "ended" in shown and "<svg" not in shown
