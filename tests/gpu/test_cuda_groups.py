"""Groups of NCCL with two ranks on one device: values, and what happens when one of them does not come."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest

from benchmarks.verify.checks import prove
from benchmarks.verify.steps import STEPS, Outcome, Step, run_all
from meshbook import ProcMesh, errors

CHECKS = [step for step in STEPS if not step.what.startswith("figures")]


@pytest.mark.timeout(200)
@pytest.mark.parametrize("step", CHECKS, ids=lambda step: step.name)
def test_a_step_of_verify_gpu_passes(step: Step, tmp_path: Path) -> None:
    outcomes: dict[str, Outcome] = {}
    run_all([step.name], "cuda", 150, tmp_path, lambda each, outcome: outcomes.update({each.name: outcome}))
    print((tmp_path / f"{step.name}.log").read_text())
    assert outcomes[step.name].result == "passed", outcomes[step.name].note


def test_operations_that_do_not_match_can_be_interrupted(pair: ProcMesh) -> None:
    prove(pair)
    run = pair.run("for _ in range(3 + dist.get_rank()): dist.all_reduce(x)\nx.sum().item()")
    try:
        run.get(8)
        print("ended by itself")
    except TimeoutError:
        print(pair.interrupt())
    except errors.CallFailed as error:
        print(error)
    print(run.exception(60))
    prove(pair)


def test_a_rank_that_is_stopped_is_waited_for_and_can_be_interrupted(own_pair: ProcMesh) -> None:
    mesh = own_pair
    prove(mesh)
    pid = mesh.status()[1].pid
    os.kill(pid, signal.SIGSTOP)
    try:
        run = mesh.run("dist.all_reduce(x)\nx.sum().item()")
        with pytest.raises(TimeoutError):
            run.get(4)
        print(mesh.stacks())
    finally:
        os.kill(pid, signal.SIGCONT)
    assert run.get(60).values() == [16.0, 16.0]
