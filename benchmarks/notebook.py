"""How long a person waits for a cell that takes no time."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator

from jupyter_core.utils import ensure_event_loop

from benchmarks.figures import Figure, Goal, Settings, side_by_side, timed
from benchmarks.running_kernel import RunningKernel
from benchmarks.subject import TIMEOUT_S

QUESTION = (
    "From Shift-Enter until the kernel is idle again, in a stock ipykernel with the extension: a cell of one line in "
    "the kernel, and the same on 8 ranks, in turns; and how much more the latter takes. From the start of a kernel "
    "until it has answered its first cell: ipykernel, and the Meshbook kernel without and with its host warmed up."
)
RANKS = 8
CELLS = {"assignment": "x = 1", "print": "print('a line')", "value": "1 + 1"}
MORE = Goal("at most", 5)
KERNELS = {
    "ipykernel": ("python3", {}),
    "no prewarm": ("meshbook", {"MESHBOOK_PREWARM": "0"}),
    "meshbook": ("meshbook", {}),
}
"""Kernelspec and environment of each, whose first prompts are compared."""
PREWARMED = Goal("x floor", 1.1)


class Notebook(RunningKernel):
    """A stock ipykernel with the extension and a mesh."""

    def __init__(self, ranks: int = RANKS) -> None:
        ensure_event_loop()
        super().__init__()
        self.last_request = ""
        self.wait_for_ready()
        self.run("%load_ext meshbook_extension")
        self.run(f"%mesh spawn gpus={ranks} --device cpu")

    def run(self, code: str, limit_s: float = TIMEOUT_S) -> float:
        """Run a cell; return the seconds from its request until the kernel is idle.

        limit_s: how long may pass between two messages.
        """
        while self.client.iopub_channel.msg_ready():
            self.client.get_iopub_msg(timeout=0)
        started = time.perf_counter()
        request = self.client.execute(code, allow_stdin=False)
        while not self._is_idle(self.client.get_iopub_msg(timeout=limit_s), request):
            pass
        took_s, self.last_request = time.perf_counter() - started, request
        if (reply := self.reply_to(request, limit_s))["status"] != "ok":
            raise RuntimeError(f"{code!r} failed: {reply}")
        return took_s

    @staticmethod
    def _is_idle(message: dict[str, dict[str, object]], request: str) -> bool:
        if message["parent_header"].get("msg_id") != request:
            return False
        return message["content"].get("execution_state") == "idle"


def run(settings: Settings) -> Iterator[Figure]:
    """Each kind of cell."""
    yield from _first_prompts(settings.count(11))
    notebook = Notebook()
    try:
        for what, code in CELLS.items():
            plain, mesh = [], []
            for _ in range(settings.count(200)):
                plain.append(notebook.run(code))
                mesh.append(notebook.run(f"%%mesh\n{code}"))
            size, more = f"{RANKS} ranks", [ours - theirs for ours, theirs in zip(mesh, plain, strict=True)]
            yield timed("notebook", what, "kernel", "ms", plain, subject="ipykernel")
            yield timed("notebook", what, size, "ms", mesh)
            yield timed("notebook", f"{what}: more than in the kernel", size, "ms", more, goal=MORE)
    finally:
        notebook.close()


def _first_prompts(count: int) -> Iterator[Figure]:
    """Each kind of kernel in turns; the first turn fills the page cache."""
    ensure_event_loop()
    samples: dict[str, list[float]] = {kind: [] for kind in KERNELS}
    for turn in range(count + 1):
        for kind, (name, environment) in KERNELS.items():
            started = time.perf_counter()
            kernel = RunningKernel(name, env={**os.environ, "PYTHONDONTWRITEBYTECODE": "", **environment})
            try:
                kernel.reply_to(kernel.client.execute("1 + 1"))
                if turn:
                    samples[kind].append(time.perf_counter() - started)
            finally:
                kernel.close()
    yield from side_by_side("notebook", "first prompt", "one kernel", "s", samples, goals={"no prewarm": PREWARMED})
