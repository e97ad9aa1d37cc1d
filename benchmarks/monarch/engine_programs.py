"""Longer programs with tensors of the ranks' own, as far as Monarch runs them without GPUs: no collectives.

Run by `programs`. With collectives, streams and gradients: tests/runtime/tensors/handles/test_monarch_examples.py.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import torch

from meshbook import fetch_shard, inspect, remote
from meshbook.monarch import Actor, context, current_rank, endpoint

PROGRAMS: list[Callable[[Any], Any]] = []


def program(function: Callable[[Any], Any]) -> Callable[[Any], Any]:
    """Have it run with a mesh of four processes, gpus=4."""
    PROGRAMS.append(function)
    return function


def own_points(rank: torch.Tensor, count: int) -> tuple[torch.Tensor, torch.Tensor]:
    """On a rank: its part of the data, points of a line."""
    x = (torch.arange(count, dtype=torch.float32) * 4 + rank.item()) / (4 * count)
    return torch.stack([x, torch.ones(count)], dim=1), 3 * x + 1


def shapes_of_points(rank: torch.Tensor, count: int) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.empty(count, 2), torch.empty(count)


@program
def tensors_of_a_mesh(procs: Any) -> Any:
    """Tensors are made, computed with, looked at on one rank, on a row of the mesh, and filled by a function there."""
    grid = procs.split(gpus=("rows", "columns"), columns=2)
    told: list[Any] = []
    with grid.activate():
        rows, columns = grid.rank_tensor("rows"), grid.rank_tensor("columns")
        place = rows * 10 + columns
        told.append([inspect(place, rows=row, columns=column).item() for row in range(2) for column in range(2)])
        table = torch.arange(6.0).view(2, 3) + place
        table[1].mul_(2)
        told.append(fetch_shard(table.sum(dim=0), rows=1, columns=0).get())
        made = remote(own_points, propagate=shapes_of_points)(columns, 2)
        told.append(inspect(made, rows=0, columns=1))
    row = grid.slice(rows=1)
    with row.activate():
        x = torch.full((2,), 3.0) * row.rank_tensor("columns")
        told.append([inspect(x, columns=column) for column in range(2)])
    return told


@program
def a_fit_on_parts_of_the_data(procs: Any) -> Any:
    """Each rank fits a line to its own points; the program averages what they have found, and all go on from there."""
    with procs.activate():
        x, y = remote(own_points, propagate=shapes_of_points)(procs.rank_tensor("gpus"), 16)
        weights = torch.zeros(2)
        losses = []
        for _ in range(40):
            for _ in range(5):
                errors = x @ weights - y
                weights.sub_(x.t() @ errors, alpha=0.05)
            losses.append(fetch_shard((errors * errors).mean(), gpus=3))
            found = [fetch_shard(weights, gpus=rank) for rank in range(4)]
            mean = [sum(values) / 4 for values in zip(*(each.get().tolist() for each in found), strict=True)]
            weights = torch.zeros(2) + remote(as_tensor, propagate=empty_pair)(mean)
        last = inspect(weights, gpus=2)
    return losses[-1].get().item() < losses[0].get().item() / 100, [round(each, 1) for each in last.tolist()]


def as_tensor(values: list[float]) -> torch.Tensor:
    return torch.tensor(values)


def empty_pair(values: list[float]) -> torch.Tensor:
    return torch.empty(len(values))


# ---- group relative policy optimization ------------------------------------------------------------------------------

STATES, ACTIONS, GROUP = 3, 4, 8
Attempt = tuple[int, int, float]
"""State, action, and advantage over the others of its group."""


class Sampler(Actor):
    """Acts by the policy that it was given last, several times in each state, and compares what that was worth."""

    def __init__(self, seed: int) -> None:
        self.random, self.policy = random.Random(seed + current_rank().rank), [[0.0] * ACTIONS] * STATES

    @endpoint
    def learn(self, policy: list[list[float]]) -> str:
        self.policy = policy
        return context().actor_instance.name

    @endpoint
    def sample(self) -> list[Attempt]:
        attempts: list[Attempt] = []
        for state, logits in enumerate(self.policy):
            chances = torch.tensor(logits).softmax(0).tolist()
            actions = self.random.choices(range(ACTIONS), chances, k=GROUP)
            rewards = [float(action == (state + 1) % ACTIONS) for action in actions]
            mean = sum(rewards) / GROUP
            spread = (sum((reward - mean) ** 2 for reward in rewards) / GROUP) ** 0.5 + 1e-6
            attempts += [
                (state, action, (reward - mean) / spread) for action, reward in zip(actions, rewards, strict=True)
            ]
        return attempts


def batch_of(rank: torch.Tensor, attempts: list[list[Attempt]]) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """On a rank: one row for each attempt of its own sampler."""
    states, actions, advantages = zip(*attempts[int(rank.item())], strict=True)
    eye = torch.eye(STATES), torch.eye(ACTIONS)
    return eye[0][list(states)], eye[1][list(actions)], torch.tensor(advantages).unsqueeze(1)


def shapes_of_batch(rank: torch.Tensor, attempts: Any) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    count = STATES * GROUP
    return torch.empty(count, STATES), torch.empty(count, ACTIONS), torch.empty(count, 1)


@program
def grpo_with_tensors_of_learners(procs: Any) -> Any:
    """Samplers are actors on half of the mesh; the policy is a tensor of the other half's own."""
    samplers = procs.slice(gpus=slice(0, 2)).spawn("samplers", Sampler, 7)
    learners = procs.slice(gpus=slice(2, 4)).rename(gpus="learners")
    with learners.activate():
        policy = torch.zeros(STATES, ACTIONS)
        for _ in range(30):
            attempts = list(samplers.sample.call().get().values())
            states, actions, advantages = remote(batch_of, propagate=shapes_of_batch)(
                learners.rank_tensor("learners"), attempts
            )
            chances = (states @ policy).softmax(dim=-1)
            policy = policy + 0.5 * (states.t() @ ((actions - chances) * advantages)) / GROUP
            both = [fetch_shard(policy, learners=rank) for rank in range(2)]
            one, other = (each.get().tolist() for each in both)
            means = [[(a + b) / 2 for a, b in zip(*rows, strict=True)] for rows in zip(one, other, strict=True)]
            samplers.learn.call(means).get()
        best = inspect(policy.argmax(dim=1), learners=0).tolist()
        sure = inspect(policy.softmax(dim=1).max(dim=1).values.min(), learners=1).item()
    return best, sure > 0.8
