"""Completion and inspection over a stock ipykernel, as a front end asks for them."""

from __future__ import annotations

import re
import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import psutil
import pytest
from patience import wait_until
from rank_lines import by_rank, each_of
from stock_kernel import TIMEOUT_S, StockKernel, with_extension

ANSWER_S = 30.0
"""A reply takes a few milliseconds; on a machine that is busy with other tests, more."""

NAMES = """%%mesh
import torch, time
model = torch.nn.Sequential(torch.nn.Linear(3, 4))
weights = torch.zeros(3)
settings = {"alpha": 1, "beta": 2}
only_on_ranks = rank
def average(values, weighting="equal"):
    "The mean of values."
    return sum(values)

LARGE = [f"name_{i}" for i in range(100_000)]

class Hostile:
    def __init__(self, how): self.how = how
    def __dir__(self):
        if self.how == "raises": raise ValueError("no")
        if self.how == "prints": print("LOOKED AT")
        if self.how == "sleeps": time.sleep(10)
        if self.how == "large": return LARGE
        return ["plain"]
raises, prints, sleeps, large = map(Hostile, ("raises", "prints", "sleeps", "large"))
"""


class FrontEnd(StockKernel):
    """Asks a stock kernel for what JupyterLab asks."""

    def try_to_run(self, code: str) -> dict[str, Any]:
        """Execute a cell that may fail; returns the reply."""
        return dict(self.client.execute_interactive(code, timeout=TIMEOUT_S, stop_on_error=False)["content"])

    def run(self, code: str) -> str:
        """Execute a cell that must succeed; returns what it printed."""
        text: list[str] = []

        def hear(message: dict[str, Any]) -> None:
            if message["msg_type"] == "stream":
                text.append(message["content"]["text"])

        reply = self.client.execute_interactive(
            code, timeout=TIMEOUT_S, output_hook=hear, allow_stdin=True, stop_on_error=False
        )
        assert reply["content"]["status"] == "ok", reply["content"]
        return "".join(text)

    def complete_once(self, cell: str, cursor: int | None = None) -> dict[str, Any]:
        reply = self.reply_to(self.client.complete(cell, len(cell) if cursor is None else cursor))
        assert reply["status"] == "ok", reply
        return reply

    def complete(self, cell: str, cursor: int | None = None) -> dict[str, Any]:
        """A reply that has something: on a busy machine a rank may take longer than anybody waits for it."""
        deadline = time.monotonic() + ANSWER_S
        while not (reply := self.complete_once(cell, cursor))["matches"] and time.monotonic() < deadline:
            pass
        return reply

    def matches(self, cell: str) -> list[str]:
        return list(self.complete(cell)["matches"])

    def offers(self, cell: str, expected: str) -> bool:
        """Whether ``expected`` is among the matches, the notebook's own of an answer that came too late aside."""
        deadline = time.monotonic() + ANSWER_S
        while expected not in self.complete_once(cell)["matches"]:
            if time.monotonic() > deadline:
                return False
        return True

    def has_none(self, cell: str) -> bool:
        return self.complete_once(cell)["matches"] == []

    def inspect_once(self, cell: str, detail: int = 0) -> str:
        reply = self.reply_to(self.client.inspect(cell, len(cell), detail_level=detail))
        assert reply["found"] == bool(reply["data"])
        return str(reply["data"].get("text/plain", ""))

    def inspect(self, cell: str, detail: int = 0) -> str:
        """A reply that has something, as `complete`."""
        deadline = time.monotonic() + ANSWER_S
        while not (text := self.inspect_once(cell, detail)) and time.monotonic() < deadline:
            pass
        return text


@pytest.fixture(scope="module")
def front(jupyter_loop: None, tmp_path_factory: pytest.TempPathFactory) -> Iterator[FrontEnd]:
    with with_extension(FrontEnd, tmp_path_factory) as front:
        front.run("%mesh spawn gpus=3 --device cpu")
        front.run(NAMES)
        front.run("here = 1\n%mesh slice left gpus=0:2")
        yield front


@pytest.mark.slow
def test_names_of_ranks_are_known_in_mesh_cells_and_nowhere_else(front: FrontEnd) -> None:
    reply = front.complete("%%mesh\nonly_on")
    assert reply["matches"] == ["only_on_ranks"]
    assert (reply["cursor_start"], reply["cursor_end"]) == (7, 14)
    assert reply["metadata"]["_jupyter_types_experimental"] == [
        {"start": 7, "end": 14, "text": "only_on_ranks", "type": "instance", "signature": ""}
    ]
    assert "only_on_ranks" not in front.complete_once("only_on")["matches"]
    assert "here" in front.matches("her") and front.has_none("%%mesh\nher")


@pytest.mark.parametrize(
    ("code", "expected"),
    [
        ("weights.res", "reshape"),
        ("model[0].wei", "weight"),
        ("settings['al", "alpha"),
        ("average(wei", "weighting="),
        ("import torch.distr", "distributed"),
        ("from torch.nn import Lin", "Linear"),
        ("%tim", "%timeit"),
        ("open('/et", "/etc/"),
        ("x = 1\nfor i in range(3):\n    weights.res", "reshape"),
    ],
)
def test_whatever_a_rank_has_is_completed(front: FrontEnd, code: str, expected: str) -> None:
    assert front.offers(f"%%mesh gpus=1\n{code}", expected)


def test_positions_count_characters_however_wide(front: FrontEnd) -> None:
    cell = "%%mesh\n# 🙂 é\ny = '🙂'; only_on"
    reply = front.complete(f"{cell} + 1", len(cell))
    assert reply["matches"] == ["only_on_ranks"]
    assert cell[reply["cursor_start"] : reply["cursor_end"]] == "only_on"


def test_shift_tab_shows_signature_docstring_and_source_of_what_is_on_the_ranks(front: FrontEnd) -> None:
    text = front.inspect("%%mesh\naverage(")
    assert "average(values, weighting='equal')" in text and "The mean of values." in text
    assert "return sum(values)" in front.inspect("%%mesh\naverage", detail=1)
    assert "model(input" in front.inspect("%%mesh\nmodel(")
    assert "shape (3,), torch.float32" in front.inspect("%%mesh\nweights")
    assert front.inspect_once("%%mesh\nnothing_of_that_name") == ""
    assert front.inspect_once("average") == ""


def test_question_marks_are_answered_by_a_rank(front: FrontEnd) -> None:
    assert "The mean of values." in _text_of(front, "%%mesh rank=0\naverage?")
    assert "return sum(values)" in _text_of(front, "%%mesh rank=0\naverage??")


def test_a_question_mark_behind_eval_asks_the_ranks(front: FrontEnd) -> None:
    assert "Signature: average(values, weighting='equal')" in _text_of(front, "%mesh eval average?")
    text = _text_of(front, "%mesh eval --at left average??")
    assert "return sum(values)" in text and "[2] " not in text
    assert "[2] " in _text_of(front, "%mesh eval rank=2 average?")


def _text_of(front: FrontEnd, cell: str) -> str:
    shown: list[str] = []
    front.client.execute_interactive(
        cell,
        timeout=TIMEOUT_S,
        allow_stdin=False,
        output_hook=lambda m: shown.append(str(m["content"].get("data", m["content"]))),
    )
    return re.sub(r"\\x1b\[[0-9;]*m", "", "".join(shown))


def test_expressions_of_eval_are_completed_and_inspected(front: FrontEnd) -> None:
    cell = "x = 1\n%mesh eval gpus=0 only_on"
    reply = front.complete(cell)
    assert reply["matches"] == ["only_on_ranks"] and reply["cursor_start"] == len(cell) - len("only_on")
    assert "The mean of values." in front.inspect("%mesh eval average(")


def test_every_cell_is_the_ranks_while_auto_is_on(front: FrontEnd) -> None:
    front.run("%mesh auto on")
    try:
        assert front.matches("only_on") == ["only_on_ranks"]
        assert "here" in front.matches("%%local\nher") and front.has_none("%%local\nonly_on")
    finally:
        front.run("%mesh auto off")


@pytest.mark.parametrize(
    "work", ["while time.time() < end: pass", "time.sleep(max(0, end - time.time()))", "torch.distributed.barrier()"]
)
def test_a_busy_rank_answers(front: FrontEnd, work: str) -> None:
    front.run(f"%%mesh rank=0 --async\nend = time.time() + 4\n{work}")
    try:
        assert front.matches("%%mesh rank=0\nonly_on") == ["only_on_ranks"]
        assert "The mean" in front.inspect("%%mesh rank=0\naverage")
    finally:  # a rank that a busy machine does not let run for seconds is told as one that did not stop
        wait_until(lambda: front.try_to_run("%mesh interrupt")["status"] == "ok", timeout_s=TIMEOUT_S)


@contextmanager
def _stopped(front: FrontEnd, ranks: str) -> Iterator[None]:
    """Ranks whose processes do not run, as those of a rank whose native code never lets go of the GIL."""
    text = front.run(
        f"print([s.pid for s in get_ipython()._meshbook_session.target((), {{'rank': '{ranks}'}}).status()])"
    )
    pids = [int(pid) for pid in text.strip("[]\n").split(",")]
    for pid in pids:
        psutil.Process(pid).send_signal(signal.SIGSTOP)
    try:
        yield
    finally:
        for pid in pids:
            psutil.Process(pid).send_signal(signal.SIGCONT)


def test_another_rank_answers_for_one_that_cannot(front: FrontEnd) -> None:
    with _stopped(front, "0"):
        assert front.matches("%%mesh\nonly_on") == ["only_on_ranks"]
        assert front.matches("%%mesh\nonly_on") == ["only_on_ranks"]


def test_the_notebooks_names_must_do_when_no_rank_answers(front: FrontEnd) -> None:
    with _stopped(front, "0-2"):
        assert "here" in front.matches("%%mesh\nher")
    assert front.matches("%%mesh\nonly_on") == ["only_on_ranks"]


def test_the_first_rank_of_the_target_answers(front: FrontEnd) -> None:
    front.run("%%mesh rank=2\nonly_on_the_last = 1")
    assert front.matches("%%mesh gpus=2\nonly_on_the") == front.matches("%%mesh rank=2\nonly_on_the")
    assert front.matches("%mesh eval rank=2 only_on_the") == ["only_on_the_last"]
    assert front.has_none("%%mesh gpus=0:2\nonly_on_the")


@pytest.mark.slow
def test_names_that_change_meanwhile_are_no_trouble(front: FrontEnd) -> None:
    changing = "while True:\n    count += 1\n    globals()[f'changing_{count % 99}'] = count\n"
    changing += "    settings[str(count)] = vars(raises)[f'a{count}'] = count\n"
    changing += "    if count % 99 == 0:\n        settings.clear()\n        vars(raises).clear()"
    front.run(f"%%mesh --async\ncount = 0\n{changing}")
    try:
        for code, expected in [("chang", "changing_1"), ("weights.res", "reshape"), ("raises.__d", "__dir__")] * 10:
            assert front.offers(f"%%mesh\n{code}", expected)
        front.matches("%%mesh\nsettings['")
    finally:
        front.run("%mesh interrupt")
    front.run("%%mesh\nraises.how = 'raises'\nsettings.update(alpha=1)")


def test_a_rank_that_has_ended_is_not_asked(front: FrontEnd) -> None:
    front.run("%mesh spawn gpus=2 --name doomed --device cpu")
    try:
        front.run("%%mesh\nonly_on_doomed = 1")
        assert front.matches("%%mesh\nonly_on_d") == ["only_on_doomed"]
        front.run("import os; os.kill(get_ipython()._meshbook_session.mesh().status()[0].pid, 9)")
        assert front.matches("%%mesh\nonly_on_d") == ["only_on_doomed"]
    finally:
        front.run("%mesh stop doomed")
    assert front.matches("%%mesh\nonly_on_r") == ["only_on_ranks"]


def test_objects_that_misbehave_when_looked_at_do_no_harm(front: FrontEnd) -> None:
    front.run("%%mesh\n5")
    assert front.has_none("%%mesh\nraises.")
    assert front.matches("%%mesh\nprints.") == ["plain"]
    assert 0 < len(front.matches("%%mesh\nlarge.na")) <= 2000
    for _ in range(6):
        assert front.has_none("%%mesh\nsleeps.")
    assert by_rank(front.run("%%mesh\nprint(_)")) == each_of(3, "5")


def test_our_own_words_are_completed(front: FrontEnd) -> None:
    assert "spawn" in front.matches("%mesh sp")
    cell = "%mesh slice right gpus=0,"
    reply = front.complete(cell)
    assert reply["matches"] == ["0", "1", "2"] and reply["cursor_start"] == len(cell)
    assert front.matches("%%mesh le") == ["left"]
    assert front.matches("%mesh push her") == ["here"]
    assert front.matches("%mesh pull only") == ["only_on_ranks"]
    assert "Start a process per rank" in front.inspect("%mesh spawn gpus=2")


def test_completeness_of_mesh_cells_is_told_as_ipython_does(front: FrontEnd) -> None:
    for cell, status in [("%%mesh\nx = 1", "incomplete"), ("%%mesh\nx = 1\n\n", "complete"), ("%mesh", "complete")]:
        assert front.reply_to(front.client.is_complete(cell))["status"] == status


def test_unloading_leaves_completion_to_ipython(front: FrontEnd) -> None:
    assert front.run("print('do_complete' in vars(get_ipython().kernel))") == "True\n"
    front.run("%unload_ext meshbook_extension")
    try:
        assert front.run("print('do_complete' in vars(get_ipython().kernel))") == "False\n"
        assert front.has_none("%%mesh\nonly_on")
    finally:
        front.run("%load_ext meshbook_extension")
    assert front.matches("%%mesh\nonly_on") == ["only_on_ranks"]


def test_a_tab_is_answered_while_the_kernel_waits_for_a_cell(front: FrontEnd) -> None:
    request = front.execute("%%mesh\nprint('begun')\ntime.sleep(30)")
    try:
        while front.client.get_iopub_msg(timeout=TIMEOUT_S)["msg_type"] != "stream":
            pass
        assert front.matches("%%mesh\nonly_on") == ["only_on_ranks"]
        assert "The mean of values." in front.inspect("%%mesh\naverage")
        assert "interrupt" in front.matches("%mesh int")
        asked = front.client.complete("%%mesh\nonly_on", 14)
        states = [state for parent, state in _states(front, until=(asked, "idle")) if parent in (asked, request)]
        assert states[-2:] == ["busy", "idle"]
        (parent, state), *_ = _states(front, until=(request, "busy"))
        assert (parent, state) == (request, "busy"), "the front end would take the kernel for idle"
    finally:
        front.manager.interrupt_kernel()
        assert front.reply_to(request, TIMEOUT_S)["status"] == "error"


@pytest.mark.slow
def test_a_subshell_completes_what_is_the_notebooks_own_meanwhile(front: FrontEnd) -> None:
    info = front.reply_to(front.client.kernel_info())
    if "kernel subshells" not in info.get("supported_features", []):
        pytest.skip("subshells came with ipykernel 7")
    control, session = front.client.control_channel, front.client.session
    control.send(session.msg("create_subshell_request"))
    subshell = control.get_msg(timeout=TIMEOUT_S)["content"]["subshell_id"]
    request = front.execute("%%mesh\ntime.sleep(30)")
    try:
        for cell, expected in [("her", "here"), ("%%mesh\nonly_on_r", "only_on_ranks")]:
            message = session.msg("complete_request", {"code": cell, "cursor_pos": len(cell)})
            message["header"]["subshell_id"] = subshell
            front.client.shell_channel.send(message)
            assert expected in front.reply_to(message["header"]["msg_id"])["matches"]
    finally:
        control.send(session.msg("delete_subshell_request", {"subshell_id": subshell}))
        front.manager.interrupt_kernel()
        front.reply_to(request, TIMEOUT_S)


def _states(front: FrontEnd, until: tuple[str, str]) -> list[tuple[str, str]]:
    """The status messages that come, as (request, state), up to ``until``."""
    seen: list[tuple[str, str]] = []
    while until not in seen:
        message = front.client.get_iopub_msg(timeout=TIMEOUT_S)
        if message["msg_type"] == "status":
            seen.append((message["parent_header"]["msg_id"], message["content"]["execution_state"]))
    return seen
