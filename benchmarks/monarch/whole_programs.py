"""Longer programs for Monarch's documented interface, as people write them; see `programs`, which runs them.

Each is given a mesh of four processes, gpus=4, and returns what must be the same under both.
"""

from __future__ import annotations

import random
import tempfile
from pathlib import Path
from typing import Any

from meshbook.monarch import (
    Actor,
    Channel,
    Port,
    ValueMesh,
    context,
    current_rank,
    current_size,
    endpoint,
    get_or_spawn_controller,
    this_host,
    this_proc,
)
from meshbook.monarch.spmd import SPMDActor

# ---- the first steps -------------------------------------------------------------------------------------------------


class Greeter(Actor):
    def __init__(self, greeting: str) -> None:
        self.greeting, self.greeted = greeting, 0

    @endpoint
    def greet(self, name: str) -> str:
        self.greeted += 1
        return f"{self.greeting} {name} from {current_rank().rank} of {current_size()}"

    @endpoint
    def greet_by(self, other: Greeter, name: str) -> list[str]:
        answers = other.greet.call(name).get()
        return [text for _, text in answers.items()]

    @endpoint
    def count(self) -> int:
        return self.greeted

    @endpoint
    def report(self, port: Port[tuple[int, str]]) -> None:
        port.send((context().actor_instance.rank.rank, self.greeting))

    @endpoint
    def refuse(self) -> None:
        raise ValueError(f"{self.greeting} is not polite")


def first_steps(procs: Any) -> Any:
    """One actor beside the program, one on each process; calls to all, to some, to one; ports; an error; an end."""
    here = this_proc().spawn("here", Greeter, "hi")
    told: list[Any] = [here.greet.call_one("ann").get()]
    greeters = procs.spawn("greeters", Greeter, "hello")
    answers: ValueMesh[str] = greeters.greet.call("bob").get()
    told.append([(dict(point), text) for point, text in answers.items()])
    told.append(answers.slice(gpus=slice(1, 3)).sizes)
    told.append(greeters.slice(gpus=3).greet.call_one("cid").get())
    told.append(sorted(future.get() for future in greeters.slice(gpus=slice(0, 2)).greet.stream("dan")))
    told.append(greeters.slice(gpus=1).greet_by.call_one(here, "eve").get())
    greeters.greet.broadcast("all")
    port, receiver = Channel[Any].open()
    greeters.report.broadcast(port)
    told.append(sorted(receiver.recv().get() for _ in range(4)))
    told.append([count for _, count in greeters.count.call().get().items()])
    try:
        greeters.refuse.call().get()
    except Exception as error:
        told.append(("not polite" in str(error), greeters.greet.call("once more").get().size()))
    grid = this_host().spawn_procs({"rows": 2, "columns": 2})
    square = grid.spawn("square", Greeter, "hey")
    told.append([(dict(point), text) for point, text in square.slice(rows=1).greet.call("fay").get().items()])
    told.append(square.flatten("all").sizes)
    grid.stop().get()
    return told


# ---- a parameter server ----------------------------------------------------------------------------------------------


class ParameterServer(Actor):
    """Fits y = a x + b: keeps a and b, and takes gradients in as they come."""

    def __init__(self, rate: float) -> None:
        self.weights, self.rate, self.version = [0.0, 0.0], rate, 0

    @endpoint
    def pull(self) -> list[float]:
        return list(self.weights)

    @endpoint
    def push(self, gradient: list[float]) -> int:
        self.weights = [weight - self.rate * part for weight, part in zip(self.weights, gradient, strict=True)]
        self.version += 1
        return self.version


class ShardWorker(Actor):
    def __init__(self, server: ParameterServer, shards: list[list[tuple[float, float]]]) -> None:
        self.server, self.shard = server, shards[current_rank().rank]

    @endpoint
    async def step(self) -> float:
        slope, offset = await self.server.pull.call_one()
        errors = [(slope * x + offset - y, x) for x, y in self.shard]
        count = len(self.shard)
        gradient = [sum(error * x for error, x in errors) / count, sum(error for error, _ in errors) / count]
        await self.server.push.call_one(gradient)
        return sum(error * error for error, _ in errors) / count


def a_parameter_server(procs: Any) -> Any:
    data = [(x / 8, 3 * x / 8 + 1) for x in range(16)]
    shards = [data[rank::4] for rank in range(4)]
    server = get_or_spawn_controller("parameters", ParameterServer, 0.1).get()
    workers = procs.spawn("workers", ShardWorker, server, shards)
    losses = []
    for _ in range(60):
        losses.append(sum(loss for _, loss in workers.step.call().get().items()))
    slope, offset = server.pull.call_one().get()
    return losses[-1] < losses[0] / 100, round(slope), round(offset)


# ---- an actor-critic loop --------------------------------------------------------------------------------------------

LENGTH, DISCOUNT = 5, 0.9
Trajectory = list[tuple[int, int, float, int]]
"""State, action, reward and next state; a walk along a line, at whose right end is the reward."""


class Player(Actor):
    """Walks by the policy that it was given last."""

    def __init__(self) -> None:
        self.random, self.right = random.Random(current_rank().rank), [0.5] * LENGTH

    @endpoint
    def take(self, right: list[float]) -> None:
        self.right = right

    @endpoint
    def play(self, steps: int) -> Trajectory:
        state, seen = 0, []
        for _ in range(steps):
            action = int(self.random.random() < self.right[state])
            after = max(0, min(LENGTH - 1, state + (1 if action else -1)))
            reward = float(after == LENGTH - 1)
            seen.append((state, action, reward, after))
            state = 0 if reward else after
        return seen


class Critic(Actor):
    def __init__(self) -> None:
        self.values = [0.0] * LENGTH

    @endpoint
    def judge(self, walks: list[Trajectory]) -> list[tuple[int, int, float]]:
        """How much better than expected each action was; what is expected is learnt from that."""
        judged = []
        for state, action, reward, after in (step for walk in walks for step in walk):
            better = reward + (0 if reward else DISCOUNT * self.values[after]) - self.values[state]
            self.values[state] += 0.1 * better
            judged.append((state, action, better))
        return judged

    @endpoint
    def worth(self) -> list[float]:
        return self.values


def an_actor_critic_loop(procs: Any) -> Any:
    players = procs.spawn("players", Player)
    critic = procs.slice(gpus=0).spawn("critic", Critic)
    right = [0.5] * LENGTH
    rewards = []
    for _ in range(25):
        players.take.call(right).get()
        walks = [walk for _, walk in players.play.call(40).get().items()]
        rewards.append(sum(reward for walk in walks for _, _, reward, _ in walk))
        for state, action, better in critic.judge.call_one(walks).get():
            right[state] = min(0.95, max(0.05, right[state] + 0.05 * better * (1 if action else -1)))
    worth = critic.worth.call_one().get()
    return rewards[-1] > 1.5 * rewards[0], [round(chance, 6) for chance in right], [round(each, 6) for each in worth]


# ---- data-parallel training ------------------------------------------------------------------------------------------

TRAINING = """
import sys
import torch
import torch.distributed as dist

if __name__ == "__main__":
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(2, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    data = torch.randn(64, 2, generator=torch.Generator().manual_seed(dist.get_rank()))
    target = data @ torch.tensor([[2.0], [-1.0]]) + 0.5
    for _ in range(100):
        optimizer.zero_grad()
        loss = torch.nn.functional.mse_loss(model(data), target)
        loss.backward()
        optimizer.step()
    weights = [round(value, 2) for value in model.module.weight[0].tolist()]
    with open(f"{sys.argv[1]}-{dist.get_rank()}", "w") as file:
        file.write(f"{weights} of {dist.get_world_size()}, loss below 0.01: {loss.item() < 0.01}")
    dist.destroy_process_group()
"""


def data_parallel_training(procs: Any) -> Any:
    with tempfile.TemporaryDirectory() as folder:
        script, output = Path(folder) / "train.py", Path(folder) / "weights"
        script.write_text(TRAINING)
        trainers = procs.spawn("trainers", SPMDActor)
        address, port = trainers.slice(gpus=0).get_host_port.call_one(None).get()
        trainers.main.call(address, port, [str(script), str(output)]).get()
        return [Path(f"{output}-{rank}").read_text() for rank in range(4)]


PROGRAMS = [first_steps, a_parameter_server, an_actor_critic_loop, data_parallel_training]
