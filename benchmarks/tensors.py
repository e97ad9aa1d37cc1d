"""What mesh tensors cost the notebook that issues their operations, and their ranks."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

import meshbook
from benchmarks.figures import Figure, Goal, Settings, side_by_side, timed
from benchmarks.stats import interleave
from benchmarks.subject import TIMEOUT_S, mesh
from meshbook import ProcMesh
from meshbook.distributed import Mesh

QUESTION = (
    "CPU time of the thread that issues operations, beside plain torch in turns: a small add, a step of AdamW on an "
    "MLP of 8 layers, the whole step as it is and recorded. Wall time of a transformer's step (4 layers, d 256) on 2 "
    "ranks, written here and as SPMD with DDP on the same ranks."
)
RANKS = 2


def run(settings: Settings) -> Iterator[Figure]:
    """One mesh for all."""
    with mesh(RANKS) as procs:
        over = Mesh(procs)
        yield from _small_add(over, settings)
        yield from _optimizers(over, settings)
        yield from _recorded(over, settings)
        yield from _transformer(over, procs, settings)


def _cpu_times(
    subjects: Mapping[str, Callable[[], Any]], over: Mesh, rounds: int, per_call: int
) -> dict[str, list[float]]:
    """CPU seconds of this thread for each subject, in turns; the ranks are done before each."""
    samples: dict[str, list[float]] = {name: [] for name in subjects}
    for number in range(-2, rounds):
        for name, subject in subjects.items():
            over.stream.settle()
            started = time.thread_time()
            subject()
            if number >= 0:
                samples[name].append((time.thread_time() - started) / per_call)
    return samples


def _small_add(over: Mesh, settings: Settings) -> Iterator[Figure]:
    count = 1000
    here = [torch.randn(16, 16) for _ in range(2)]
    there = [meshbook.distribute(tensor, over) for tensor in here]

    def add(x: torch.Tensor, y: torch.Tensor) -> None:
        for _ in range(count):
            x + y

    with torch.no_grad():
        subjects = {"plain torch": lambda: add(*here), "meshbook": lambda: add(*there)}
        seconds = _cpu_times(subjects, over, settings.count(40), count)
    goals = {"plain torch": Goal("x floor", 12), "meshbook": Goal("at most", 15)}
    yield from side_by_side("tensors", "add", "16 x 16", "us", seconds, goals=goals)


def _mlp() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(*[part for _ in range(8) for part in (nn.Linear(64, 64), nn.GELU())])


def training_step(model: nn.Module, optimizer: torch.optim.Optimizer) -> Callable[[torch.Tensor], torch.Tensor]:
    def step(x: torch.Tensor) -> torch.Tensor:
        optimizer.zero_grad()
        loss = nn.functional.mse_loss(model(x), x)
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        return loss

    return step


def _optimizers(over: Mesh, settings: Settings) -> Iterator[Figure]:
    for way in ("foreach", "fused"):
        models = {"plain torch": _mlp(), "meshbook": meshbook.module_to_mesh(_mlp(), over)}
        optimizers = {
            name: torch.optim.AdamW(model.parameters(), foreach=way == "foreach", fused=way == "fused")
            for name, model in models.items()
        }
        for name, model in models.items():
            x = torch.randn(32, 64) if name == "plain torch" else meshbook.randn(32, 64, mesh=over)
            training_step(model, optimizers[name])(x)
        seconds = _cpu_times({name: each.step for name, each in optimizers.items()}, over, settings.count(60), 1)
        goals = {"meshbook": Goal("at most", 2.5)}
        yield from side_by_side("tensors", f"AdamW, {way}", "8 layers", "ms", seconds, goals=goals)


def _recorded(over: Mesh, settings: Settings) -> Iterator[Figure]:
    """A whole step: forward, backward, optimizer; alone, and in rows as a loop asks for them.

    In a long row the ranks are behind, so it is their answers that take time here.
    """
    x = meshbook.randn(32, 64, mesh=over)
    optimizers: dict[str, Callable[..., torch.optim.Optimizer]] = {
        "SGD": lambda parameters: torch.optim.SGD(parameters, lr=0.01),
        "AdamW, fused": lambda parameters: torch.optim.AdamW(parameters, fused=True),
    }
    for name, optimizer in optimizers.items():
        models = [meshbook.module_to_mesh(_mlp(), over) for _ in range(2)]
        step, repeated = (training_step(model, optimizer(model.parameters())) for model in models)
        compiled = meshbook.compile(repeated)
        for _ in range(8):
            compiled(x)
        subjects = {"as it is": lambda step=step: step(x), "meshbook": lambda compiled=compiled: compiled(x)}
        seconds = _cpu_times(subjects, over, settings.count(60), 1)
        yield from side_by_side("tensors", f"recorded step, {name}", "8 layers", "us", seconds)
        for length, goal in ((10, Goal("at most", 60)), (100, None)):
            row = {"meshbook": lambda compiled=compiled, length=length: [compiled(x) for _ in range(length)]}
            seconds = _cpu_times(row, over, settings.count(600 // length), length)
            what = f"recorded step, {name}, {length} in a row"
            yield timed("tensors", what, "8 layers", "us", seconds["meshbook"], goal=goal)
    double = meshbook.compile(lambda value: value * 2)
    for _ in range(4):
        double(x)
    seconds = _cpu_times({"meshbook": lambda: [double(x) for _ in range(10)]}, over, settings.count(60), 10)
    yield timed("tensors", "recorded step in a row", "1 operation", "us", seconds["meshbook"], goal=Goal("at most", 60))


# ---- a transformer, here and on the ranks --------------------------------------------------------------------------


class Block(nn.Module):
    """Attention and an MLP."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norms = nn.ModuleList([nn.LayerNorm(width), nn.LayerNorm(width)])
        self.qkv, self.o = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        parts = self.qkv(self.norms[0](x)).chunk(3, -1)
        q, k, v = (part.unflatten(-1, (self.heads, -1)).transpose(1, 2) for part in parts)
        mixed = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.o(mixed.transpose(1, 2).flatten(-2))
        after: torch.Tensor = x + self.mlp(self.norms[1](x))
        return after


WIDTH, VOCABULARY, BATCH, LENGTH = 256, 128, 16, 64


def transformer() -> nn.Module:
    """Four layers."""
    torch.manual_seed(0)
    blocks = [Block(WIDTH, 4) for _ in range(4)]
    return nn.Sequential(nn.Embedding(VOCABULARY, WIDTH), *blocks, nn.Linear(WIDTH, VOCABULARY))


def language_step(model: nn.Module) -> Callable[[torch.Tensor], torch.Tensor]:
    """A step of training on a batch of text."""
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)

    def step(text: torch.Tensor) -> torch.Tensor:
        optimizer.zero_grad()
        guessed = model(text[:, :-1])
        loss = nn.functional.cross_entropy(guessed.flatten(0, 1), text[:, 1:].flatten())
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        return loss

    return step


def prepare_ddp(device: str = "cpu") -> None:
    """On a rank: the same with DDP, on this rank's rows."""
    global _on_rank
    ddp = nn.parallel.DistributedDataParallel(transformer().to(device))
    rows = BATCH // dist.get_world_size()
    text = torch.randint(0, VOCABULARY, (rows, LENGTH + 1), device=device)
    step = language_step(ddp)
    _on_rank = lambda: step(text).item()  # noqa: E731


_on_rank: Callable[[], float]


def step_on_rank() -> float:
    """One step; returns the loss."""
    return _on_rank()


def transformer_steps(over: Mesh, procs: ProcMesh, axis: str, device: str = "cpu") -> dict[str, Callable[[], Any]]:
    """Return steps on the same ranks: by DDP, by mesh tensors as they are, and recorded."""
    spread = meshbook.distribute(torch.randint(0, VOCABULARY, (BATCH, LENGTH + 1)), over, [axis])
    step = language_step(meshbook.module_to_mesh(transformer(), over))
    compiled = meshbook.compile(language_step(meshbook.module_to_mesh(transformer(), over)))
    for _ in range(4):
        compiled(spread)
    procs.execute(prepare_ddp, device).get(TIMEOUT_S)
    return {
        "SPMD, DDP": lambda: procs.execute(step_on_rank).get(TIMEOUT_S),
        "as it is": lambda: step(spread).item(),
        "meshbook": lambda: compiled(spread).item(),
    }


def _transformer(over: Mesh, procs: ProcMesh, settings: Settings) -> Iterator[Figure]:
    text = torch.randint(0, VOCABULARY, (BATCH, LENGTH + 1))
    plain = language_step(transformer())
    subjects = {
        "plain torch, one process": lambda: plain(text).item(),
        **transformer_steps(over, procs, "gpus"),
    }
    seconds = interleave(subjects, rounds=settings.count(15), per_round=1, warmup=1)
    what, size = "transformer step", f"4 layers, d {WIDTH}"
    goals = {"SPMD, DDP": Goal("x floor", 1.1)}
    yield from side_by_side("tensors", what, size, "ms", seconds, goals=goals)
    seconds = {"SPMD, DDP": [], "meshbook": []}
    for _ in range(settings.count(15)):
        for name, samples in seconds.items():
            started = _cpu_of_a_rank(procs)
            subjects[name]()
            samples.append(_cpu_of_a_rank(procs) - started)
    yield from side_by_side("tensors", "transformer step, CPU of a rank", size, "ms", seconds, goals=goals)


def _cpu_of_a_rank(procs: ProcMesh) -> float:
    """Of the thread that computes: that others use the machine costs it little."""
    return next(iter(procs.execute(time.thread_time).get(TIMEOUT_S).values()))
