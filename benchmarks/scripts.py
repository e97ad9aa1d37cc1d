"""A script that was written for torchrun: by torchrun, and on ranks that live."""

from __future__ import annotations

import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

from benchmarks.figures import Figure, Goal, Settings, side_by_side
from benchmarks.subject import TIMEOUT_S, mesh
from meshbook import ProcMesh
from meshbook.calls.output import OutputEvent, StreamText
from meshbook.mesh.rank_calls import start_cell
from meshbook.shell.scripts import read_script

QUESTION = (
    "A script of torchrun on 2 ranks: from the command until its first line runs on all ranks, and the time of a step "
    "of DDP over a small GPT. Floor: torchrun, which starts an interpreter for each rank that imports torch; files are "
    "in the page cache."
)
RANKS = 2
STEPS = 30
SCRIPT = """\
import time
print(f"begun {time.time()}\\n", end="", flush=True)  # in one piece
import sys
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

class Block(nn.Module):
    def __init__(self, width, heads):
        super().__init__()
        self.first, self.second = nn.LayerNorm(width), nn.LayerNorm(width)
        self.attention = nn.MultiheadAttention(width, heads, batch_first=True)
        self.hidden = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    def forward(self, x):
        seen = torch.triu(torch.ones(x.shape[1], x.shape[1], dtype=torch.bool), 1)
        y = self.first(x)
        x = x + self.attention(y, y, y, attn_mask=seen, need_weights=False)[0]
        return x + self.hidden(self.second(x))

def main():
    torch.set_num_threads(1)
    torch.manual_seed(7)
    dist.init_process_group("gloo")
    net = nn.Sequential(nn.Embedding(256, 64), *(Block(64, 4) for _ in range(2)), nn.Linear(64, 256))
    model = DistributedDataParallel(net)
    optimizer = torch.optim.AdamW(model.parameters())
    tokens = torch.randint(256, (8, 65))
    times = []
    for step in range(int(sys.argv[1])):
        began = time.perf_counter()
        logits = model(tokens[:, :-1])
        loss = nn.functional.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        times.append(time.perf_counter() - began)
    print(f"step {sorted(times)[len(times) // 2]}\\n", end="", flush=True)
    dist.destroy_process_group()

if __name__ == "__main__" and int(sys.argv[1]):
    main()
"""


def run(settings: Settings) -> Iterator[Figure]:
    """Run the script by each in turns, to its first line alone and with steps."""
    begun: dict[str, list[float]] = {"torchrun": [], "meshbook": []}
    steps: dict[str, list[float]] = {"torchrun": [], "meshbook": []}
    with mesh(RANKS) as procs, tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "train.py")
        path.write_text(SCRIPT)
        for turn in range(settings.count(10) + 1):
            for name, output in (("torchrun", _by_torchrun), ("meshbook", _on_mesh)):
                started = time.time()
                first = max(_numbers("begun", output(procs, path, 0))) - started
                step = max(_numbers("step", output(procs, path, STEPS)))
                if turn:  # the first brings files into the page cache
                    begun[name].append(first)
                    steps[name].append(step)
    size = f"{RANKS} ranks"
    yield from side_by_side("scripts", "first line", size, "ms", begun, goals={"torchrun": Goal("x floor", 0.1)})
    yield from side_by_side("scripts", "step of DDP", size, "ms", steps, goals={"torchrun": Goal("x floor", 1.02)})


def _numbers(word: str, text: str) -> list[float]:
    found = [float(number) for number in re.findall(rf"{word} ([\d.e-]+)", text)]
    assert len(found) == RANKS, text
    return found


def _by_torchrun(procs: ProcMesh, path: Path, steps: int) -> str:
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={RANKS}"]
    ran = subprocess.run([*command, str(path), str(steps)], capture_output=True, text=True, timeout=TIMEOUT_S)
    assert ran.returncode == 0, ran.stderr
    return ran.stdout


def _on_mesh(procs: ProcMesh, path: Path, steps: int) -> str:
    shown: list[str] = []

    def receive(event: OutputEvent) -> None:
        if isinstance(event, StreamText):
            shown.append(event.text)

    start_cell(procs, read_script([str(path), str(steps)]), on_output=receive).future.get(TIMEOUT_S)
    return "".join(shown)
