"""How long a person waits for Tab and Shift-Tab in a cell for ranks."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator

from benchmarks.figures import Figure, Goal, Settings, timed
from benchmarks.notebook import Notebook
from benchmarks.stats import seconds, summarise
from benchmarks.subject import TIMEOUT_S

QUESTION = (
    "complete_request and inspect_request for a %%mesh cell, from the front end and back, 4 ranks with 500 names: "
    "idle, and while a cell in the foreground keeps ranks and kernel busy. Beside it IPython's own answer for a name "
    "of the notebook, idle; and how many answers did not come from a rank."
)
RANKS = 4
NAMES = """%%mesh
import time, torch
weights = torch.zeros(3)
globals().update({f"name_{number}": number for number in range(500)})
def average(values, weighting="equal"):
    "The mean of values."
"""
BUSY = {
    "python loop": "while True: pass",
    "time.sleep": "time.sleep(600)",
    "collective": "torch.distributed.barrier() if rank else time.sleep(600)",
    "matrix product": "a = torch.rand(1500, 1500)\nwhile True: a @ a",
}
GOAL = Goal("at most", 100)


class FrontEnd(Notebook):
    """A notebook, and the questions that its front end asks."""

    def __init__(self) -> None:
        super().__init__(RANKS)
        self.missed = 0

    @contextlib.contextmanager
    def running(self, code: str) -> Iterator[None]:
        """Inside the block ``code`` runs on the ranks, and the kernel waits for it."""
        request = self.client.execute(f"%%mesh\nprint('begun', flush=True)\n{code}", allow_stdin=False)
        while self.client.get_iopub_msg(timeout=TIMEOUT_S)["msg_type"] != "stream":
            pass
        time.sleep(0.5)
        try:
            yield
        finally:
            self.manager.interrupt_kernel()
            self.reply_to(request)

    def complete(self, cell: str, expected: str) -> None:
        """Ask for completions at the end of ``cell``; count it if ``expected`` is not among them."""
        self.missed += expected not in self.reply_to(self.client.complete(cell, len(cell)))["matches"]

    def inspect(self, cell: str, expected: str) -> None:
        """Ask what stands at the end of ``cell``."""
        data = self.reply_to(self.client.inspect(cell, len(cell)))["data"]
        self.missed += expected not in data.get("text/plain", "")


def run(settings: Settings) -> Iterator[Figure]:
    """Idle, then busy in each way."""
    front = FrontEnd()
    try:
        front.run(NAMES)
        front.run("local_name = 1")
        count = settings.count(200)
        yield _ask("complete, notebook", "idle", lambda: front.complete("local_na", "local_name"), count, goal=None)
        yield from _ask_all(front, "idle", count)
        for state, code in BUSY.items():
            with front.running(code):
                yield from _ask_all(front, state, count)
    finally:
        front.close()


def _ask_all(front: FrontEnd, state: str, count: int) -> Iterator[Figure]:
    front.missed = 0
    yield _ask("complete, names", state, lambda: front.complete("%%mesh\nx = 1\nname_", "name_0"), count)
    yield _ask("complete, attributes", state, lambda: front.complete("%%mesh\nweights.res", "reshape"), count)
    yield _ask("inspect", state, lambda: front.inspect("%%mesh\naverage(", "The mean of values."), count)
    yield Figure("completion", "not by a rank", state, "meshbook", "count", summarise([front.missed]))


def _ask(what: str, state: str, ask: Callable[[], None], count: int, goal: Goal | None = GOAL) -> Figure:
    subject = "meshbook" if goal else "IPython"
    ask()
    return timed("completion", what, state, "ms", [seconds(ask) for _ in range(count)], subject=subject, goal=goal)
