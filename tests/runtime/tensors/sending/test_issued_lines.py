"""Where ranks are in operations of mesh tensors is told by the line that asked for them, as the ranks see it."""

from __future__ import annotations

import contextlib
import inspect
import os
import signal
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from patience import beside, wait_until

import meshbook
from meshbook import ProcMesh, errors
from meshbook.distributed import Mesh, TensorError
from meshbook.mesh import states
from meshbook.tensors.messages.issued_lines import each_line, for_ranks
from meshbook.tensors.sending import op_settling


@contextlib.contextmanager
def one_rank_stopped(grid: Mesh) -> Iterator[Callable[[], None]]:
    """The last rank does not run; yields what lets it go on."""
    pid = list(grid.procs.execute(os.getpid).get(30).values())[-1]
    os.kill(pid, signal.SIGSTOP)
    try:
        yield lambda: os.kill(pid, signal.SIGCONT)
    finally:
        os.kill(pid, signal.SIGCONT)


def _cut(grid: Mesh) -> torch.Tensor:
    return meshbook.distribute(torch.arange(64.0).reshape(8, 8), grid, [("dp", "tp"), None])


def _waits(grid: Mesh) -> bool:
    return "all_gather" in states.where(grid.procs)[0] or "all_reduce" in states.where(grid.procs)[0]


def test_stacks_show_the_line_and_the_operation(grid: Mesh) -> None:
    x = _cut(grid)
    told = []

    def look() -> None:
        wait_until(lambda: _waits(grid))
        told.append((states.where(grid.procs)[0], str(grid.procs.stacks())))
        go_on()

    with one_rank_stopped(grid) as go_on, beside(look):
        line = inspect.currentframe().f_lineno + 1  # type: ignore[union-attr]
        product = x @ x.T
        assert product.sum().item() == (torch.arange(64.0).reshape(8, 8) @ torch.arange(64.0).reshape(8, 8).T).sum()
    ((where, stacks),) = told
    assert f"(test_issued_lines.py:{line})" in where
    assert f"test_issued_lines.py:{line}" in stacks
    assert "aten.mm.default" in stacks


@pytest.mark.slow
def test_an_interrupt_names_the_line_and_leaves_the_others_tensors(grid: Mesh) -> None:
    x, kept = _cut(grid), _cut(grid) + 1
    kept.sum().item()

    def press() -> None:
        wait_until(lambda: _waits(grid))
        os.kill(os.getpid(), signal.SIGINT)

    with one_rank_stopped(grid), beside(press):
        line = inspect.currentframe().f_lineno + 1  # type: ignore[union-attr]
        product = x @ x.T
        with pytest.raises(KeyboardInterrupt):
            product.sum().item()
    with pytest.raises((TensorError, errors.CallError), match=r"KeyboardInterrupt|interrupted") as lost:
        product.sum().item()
    assert f"line {line}" in str(lost.value) or f":{line}" in str(lost.value)
    assert kept.sum().item() == 64 + sum(range(64))
    assert (kept * 2).sum().item() == 2 * (64 + sum(range(64)))


@pytest.mark.slow
def test_an_interrupt_before_a_rank_has_begun_is_told_with_the_line(mesh2: ProcMesh, tmp_path: Path) -> None:
    x = meshbook.distribute(torch.ones(4, 2), Mesh(mesh2), ["gpus", None])
    assert x.softmax(0).sum().item() == 2
    busy = mesh2.select([1]).execute(wait_until, lambda: (tmp_path / "go").exists(), timeout_s=60)

    def press() -> None:
        wait_until(lambda: "test_issued_lines.py" in states.where(mesh2)[0])
        os.kill(os.getpid(), signal.SIGINT)

    line = inspect.currentframe().f_lineno + 1  # type: ignore[union-attr]
    spread = x.softmax(0)
    with beside(press), pytest.raises(KeyboardInterrupt):
        spread.sum().item()
    (tmp_path / "go").touch()
    busy.get(60)
    with pytest.raises(TensorError, match=rf"softmax.*line {line}\) failed: .*before it started"):
        spread.sum().item()
    assert x.softmax(0).sum().item() == 2


def test_a_recorded_step_shows_its_lines(grid: Mesh) -> None:
    x = _cut(grid)

    def multiply(tensor: torch.Tensor) -> torch.Tensor:
        return tensor @ tensor.T

    line = inspect.getsourcelines(multiply)[1] + 1
    step = meshbook.compile(multiply)
    for _ in range(3):
        step(x).sum().item()
    told = []

    def look() -> None:
        wait_until(lambda: _waits(grid))
        told.append(states.where(grid.procs)[0])
        go_on()

    with one_rank_stopped(grid) as go_on, beside(look):
        step(x)
        grid.stream.settle()
    assert f"(test_issued_lines.py:{line})" in told[0]


def test_a_long_wait_says_who_holds_the_ranks_up(
    grid: Mesh, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(op_settling, "HANG_NOTE_S", 1.5)
    x, noted = _cut(grid), []

    def look() -> None:
        wait_until(lambda: noted.append(capsys.readouterr().err) or "is stopped by SIGSTOP" in noted[-1], timeout_s=60)
        go_on()

    with one_rank_stopped(grid) as go_on, beside(look):
        assert (x @ x.T).shape == (8, 8)
        grid.stream.settle()
    assert "mesh tensors wait for this: " in noted[-1]
    assert "test_issued_lines.py:" in noted[-1]


def test_calls_for_mesh_tensors_are_named_by_their_line(grid: Mesh) -> None:
    with one_rank_stopped(grid):
        line = inspect.currentframe().f_lineno + 1  # type: ignore[union-attr]
        asked = grid.stream.ask("stepped")
        with pytest.raises(
            errors.CallTimeout, match=rf"^mesh tensors \(.*test_issued_lines.py, line {line}\): no answer"
        ):
            asked.get(0.5)
    asked.get(60)


def test_lines_travel_once_for_operations_in_a_row() -> None:
    a, b = ("a.py", 1), ("a.py", 2)
    places = [a, a, b, None, None, a]
    assert for_ranks(places) == [(0, a), (2, b), (3, None), (5, a)]
    assert list(each_line(for_ranks(places), 6)) == places
    assert list(each_line(for_ranks([]), 0)) == []
