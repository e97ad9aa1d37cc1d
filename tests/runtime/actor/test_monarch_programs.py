"""Programs as they are written for monarch.actor: only their import is another one."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from benchmarks.monarch import whole_programs
from meshbook import ProcMesh

pytestmark = pytest.mark.monarch


FIRST_STEPS = [
    "hi ann from 0 of {}",
    [({"gpus": rank}, f"hello bob from {rank} of {{'gpus': 4}}") for rank in range(4)],
    {"gpus": 2},
    "hello cid from 0 of {}",
    [f"hello dan from {rank} of {{'gpus': 2}}" for rank in range(2)],
    ["hi eve from 0 of {}"],
    [(rank, "hello") for rank in range(4)],
    [3, 3, 2, 3],
    (True, 4),
    [({"columns": column}, f"hey fay from {column} of {{'columns': 2}}") for column in range(2)],
    {"all": 4},
]


@pytest.mark.parametrize(
    ("program", "expected"),
    [
        (whole_programs.first_steps, FIRST_STEPS),
        (whole_programs.a_parameter_server, (True, 3, 1)),
        (whole_programs.data_parallel_training, ["[2.0, -1.0] of 4, loss below 0.01: True"] * 4),
    ],
)
def test_a_program_for_monarch_gives_its_answer(
    mesh4: ProcMesh, program: Callable[[ProcMesh], Any], expected: object
) -> None:
    assert program(mesh4) == expected
