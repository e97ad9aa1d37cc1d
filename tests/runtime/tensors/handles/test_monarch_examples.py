"""What a tutorial of tensors of ranks' own, and GRPO with a learner that drives them, do here: with collectives,
gradients and streams, which Monarch has on GPUs only. Without these: benchmarks/monarch/engine_programs.py."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch

import meshbook as monarch
from meshbook import ProcMesh, this_host, this_proc
from meshbook.actor import Actor, context, current_rank, endpoint
from meshbook.monarch import this_host as hosts_at_once


@pytest.fixture(scope="module")
def grid(clean_end: None) -> Iterator[ProcMesh]:
    with this_host().spawn_procs({"stages": 2, "replicas": 2}, name="grid", device="cpu") as procs:
        yield procs


def test_a_pipeline_of_two_stages_hands_activations_over(grid: ProcMesh) -> None:
    first, second = grid.slice(stages=0), grid.slice(stages=1)
    transfers = monarch.Stream("transfers")
    with first.activate():
        x = torch.ones(4, 3) * (first.rank_tensor("replicas") + 1)
        hidden = (x @ torch.full((3, 2), 0.5)).relu()
        borrowed, borrow = transfers.borrow(hidden)
        with transfers.activate():
            handed = borrowed.to_mesh(second)
        borrow.drop()
    with second.activate():
        out = handed.sum(dim=1)
        told = [monarch.inspect(out, replicas=rank) for rank in range(2)]
    assert [each.tolist() for each in told] == [[3.0] * 4, [6.0] * 4]


STATES, ACTIONS, GROUP = 2, 3, 8


class Sampler(Actor):
    def __init__(self) -> None:
        self.generator = torch.Generator().manual_seed(current_rank().rank)
        self.policy = torch.zeros(STATES, ACTIONS)

    @endpoint
    def sample(self, policy: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """States, actions, and how much better each was than the others of its group."""
        actions = policy.softmax(1).multinomial(GROUP, replacement=True, generator=self.generator)
        rewards = (actions == torch.arange(STATES).unsqueeze(1) + 1).float()
        advantages = (rewards - rewards.mean(1, keepdim=True)) / (rewards.std(1, keepdim=True) + 1e-6)
        states = torch.arange(STATES).repeat_interleave(GROUP)
        return states, actions.flatten(), advantages.flatten()


def loss_of(policy: torch.Tensor, states: torch.Tensor, actions: torch.Tensor, advantages: torch.Tensor) -> Any:
    chosen = policy.log_softmax(1)[states].gather(1, actions.unsqueeze(1)).squeeze(1)
    return -(chosen * advantages).mean()


def part_of(rank: torch.Tensor, parts: list[tuple[torch.Tensor, ...]]) -> tuple[torch.Tensor, ...]:
    return parts[int(rank.item())]


def shapes_of_part(rank: torch.Tensor, parts: Any) -> tuple[torch.Tensor, ...]:
    count = STATES * GROUP
    return torch.empty(count, dtype=torch.int64), torch.empty(count, dtype=torch.int64), torch.empty(count)


class Learner(Actor):
    """An actor of the program's process that drives tensors on processes of its own."""

    def __init__(self) -> None:
        self.procs: Any = hosts_at_once().spawn_procs({"learners": 2}, name="learners")
        self.procs.initialized.get()
        with self.procs.activate():
            self.policy = torch.zeros(STATES, ACTIONS, requires_grad=True)

    @endpoint
    def learn(self, samplers: Sampler, steps: int) -> torch.Tensor:
        learners = self.procs
        assert context().actor_instance.proc_mesh is not None
        with learners.activate():
            for _ in range(steps):
                now = monarch.inspect(self.policy.detach(), learners=0)
                parts = list(samplers.sample.call(now).get().values())
                rank = learners.rank_tensor("learners")
                batch = monarch.remote(part_of, propagate=shapes_of_part)(rank, parts)
                loss = loss_of(self.policy, *batch)
                self.policy.grad = None
                loss.backward()
                self.policy.grad.reduce_("learners", "avg")
                with torch.no_grad():
                    self.policy.sub_(self.policy.grad, alpha=2.0)
            found: torch.Tensor = monarch.inspect(self.policy.detach(), learners=1)
        return found


@pytest.mark.slow
def test_grpo_whose_learner_is_an_actor_that_drives_tensors(grid: ProcMesh) -> None:
    samplers = grid.slice(stages=0).spawn("samplers", Sampler)
    learner = this_proc().spawn("learner", Learner)
    policy = learner.learn.call_one(samplers, 30).get(300)
    assert policy.argmax(1).tolist() == [1, 2] and policy.softmax(1).max(1).values.min() > 0.8
