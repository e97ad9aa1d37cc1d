"""The visual debugger, as JupyterLab's panel uses it, in our kernel and in a stock one."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from typing import Any

import pytest
from panel_client import Panel

pytestmark = pytest.mark.kernel

CELL = "%%mesh\ny = 1\nfor i in range(3):\n    y += i * rank\nprint('y', y)"


@pytest.fixture(scope="module", params=["meshbook", "python3"])
def kernel(request: pytest.FixtureRequest, kernel_type: Any) -> Iterator[Any]:
    """A kernel whose mesh has two ranks, for all tests here."""
    kernel = kernel_type(request.param)
    try:
        kernel.wait_for_ready()
        panel = Panel(kernel.client)
        if request.param == "python3":
            panel.do("%load_ext meshbook")
        panel.do("%mesh spawn gpus=2 --device cpu")
        yield kernel
    finally:
        kernel.close()


@pytest.fixture
def panel(kernel: Any) -> Iterator[Panel]:
    """A panel that is off, before and after."""
    panel = Panel(kernel.client)
    yield panel
    panel.ask("disconnect", restart=False)
    panel.do("%mesh debug --off")


def test_the_panel_stops_in_a_rank_looks_steps_and_goes_on(panel: Panel) -> None:
    assert "rank 1 " in panel.do("%mesh debug 1")
    panel.attach()
    path = panel.set_breakpoint(CELL, 4)
    cell = panel.run(CELL)
    thread = panel.event("stopped")["threadId"]
    assert panel.ask("debugInfo")["body"]["stoppedThreads"] == [thread]
    frames = panel.ask("stackTrace", threadId=thread)["body"]["stackFrames"]
    assert (frames[0]["line"], frames[0]["source"]["path"]) == (4, path)
    scopes = panel.ask("scopes", frameId=frames[0]["id"])["body"]["scopes"]
    variables = panel.ask("variables", variablesReference=scopes[0]["variablesReference"])["body"]["variables"]
    assert {"y": "1", "i": "0", "rank": "1"}.items() <= {each["name"]: each["value"] for each in variables}.items()
    panel.ask("next", threadId=thread)
    assert panel.event("stopped")["reason"] == "step"
    panel.ask("setBreakpoints", breakpoints=[], source={"path": path})
    panel.ask("continue", threadId=thread)
    assert panel.reply(cell)["status"] == "ok"
    assert "[0] y 1" in panel.output and "[1] y 4" in panel.output
    panel.ask("disconnect", restart=False, terminateDebuggee=False)
    assert not panel.ask("debugInfo")["body"]["isStarted"]


def test_an_interrupt_brings_the_prompt_back_and_the_panel_stops_again(panel: Panel, kernel: Any) -> None:
    panel.do("%mesh debug 1")
    panel.attach()
    panel.set_breakpoint(CELL, 4)
    for _ in range(2):
        cell = panel.run(CELL)
        panel.event("stopped")
        kernel.manager.interrupt_kernel()
        assert panel.reply(cell)["status"] == "error"
        panel.event("continued")
        assert panel.ask("debugInfo")["body"]["stoppedThreads"] == []
    panel.ask("disconnect")
    assert "[1] y 4" in panel.do(CELL)


def test_between_cells_the_panel_lists_the_ranks_variables(panel: Panel) -> None:
    panel.do("%mesh debug 1")
    panel.attach()
    panel.do("%%mesh\nweights = torch.ones(2, 3)\nwho = f'rank {rank}'\n_private = 1")
    found = panel.ask("inspectVariables")["body"]["variables"]
    values = {each["name"]: each["value"] for each in found}
    assert values["who"] == "'rank 1'" and values["weights"] == "Tensor (2, 3), torch.float32"
    assert "_private" not in values
    rich = panel.ask("richInspectVariables", variableName="who")["body"]["data"]
    assert rich["text/plain"] == "'rank 1'"
    assert isinstance(panel.ask("modules")["body"]["modules"], list)


def test_while_stopped_the_panel_evaluates_and_copies_and_others_run_on(panel: Panel) -> None:
    panel.do("%mesh debug 1")
    panel.attach()
    cell = "%%mesh\ndef f(a):\n    b = a + rank\n    return b\nprint('got', f(5))"
    path = panel.set_breakpoint(cell, 4)
    request = panel.run(cell)
    thread = panel.event("stopped")["threadId"]
    frames = panel.ask("stackTrace", threadId=thread)["body"]["stackFrames"]
    assert [(frame["name"], frame["line"], frame["source"]["path"]) for frame in frames] == [
        ("f", 4, path),
        ("<module>", 5, path),
    ]
    frame = frames[0]["id"]
    assert panel.ask("evaluate", expression="b * 2", frameId=frame, context="repl")["body"]["result"] == "12"
    rich = panel.ask("richInspectVariables", variableName="b", frameId=frame)["body"]["data"]
    assert rich["text/plain"] == "6"
    panel.ask("copyToGlobals", srcVariableName="b", dstVariableName="kept", srcFrameId=frame)
    assert panel.ask("source", source={"path": path})["body"]["content"] == cell
    panel.ask("stepOut", threadId=thread)
    panel.event("stopped")
    panel.ask("continue", threadId=thread)
    assert panel.reply(request)["status"] == "ok"
    assert "[0] got 5" in panel.output and "[1] got 6" in panel.output
    assert "6" in panel.do("%mesh eval rank=1 kept")


@pytest.mark.some("meshbook")
def test_the_panel_is_the_notebooks_own_without_a_rank(panel: Panel) -> None:
    panel.do("%mesh debug 1")
    assert "no longer under the debugger" in panel.do("%mesh debug --off")
    panel.attach()
    panel.set_breakpoint("here = 1\nthere = 2", 2)
    cell = panel.run("here = 1\nthere = 2")
    thread = panel.event("stopped")["threadId"]
    panel.ask("continue", threadId=thread)
    assert panel.reply(cell)["status"] == "ok"
    assert "press its bug button twice" in panel.do("%mesh debug 1")
    panel.ask("disconnect")
    panel.attach()
    panel.set_breakpoint(CELL, 4)
    cell = panel.run(CELL)
    thread = panel.event("stopped")["threadId"]
    frame = panel.ask("stackTrace", threadId=thread)["body"]["stackFrames"][0]["id"]
    assert panel.ask("evaluate", expression="rank", frameId=frame, context="repl")["body"]["result"] == "1"
    panel.ask("disconnect")
    assert panel.reply(cell)["status"] == "ok"


def test_the_panel_moves_to_another_rank_with_its_breakpoints(panel: Panel) -> None:
    panel.do("%mesh debug 1")
    panel.attach()
    panel.set_breakpoint(CELL, 4)
    assert "the debugger panel is there, with its breakpoints" in panel.do("%mesh debug 0")
    assert panel.ask("debugInfo")["body"]["isStarted"]
    cell = panel.run(CELL)
    thread = panel.event("stopped")["threadId"]
    frame = panel.ask("stackTrace", threadId=thread)["body"]["stackFrames"][0]["id"]
    assert panel.ask("evaluate", expression="rank", frameId=frame, context="repl")["body"]["result"] == "0"
    panel.ask("disconnect")
    assert panel.reply(cell)["status"] == "ok"


@pytest.mark.slow
def test_a_rank_that_dies_while_stopped_ends_the_session_and_a_healed_one_stops_again(panel: Panel) -> None:
    panel.do("%mesh debug 1")
    panel.attach()
    cell = "%%mesh\nimport os\npid = os.getpid()\nprint(pid)"
    panel.set_breakpoint(cell, 4)
    request = panel.run(cell)
    thread = panel.event("stopped")["threadId"]
    frame = panel.ask("stackTrace", threadId=thread)["body"]["stackFrames"][0]["id"]
    pid = panel.ask("evaluate", expression="pid", frameId=frame, context="repl")["body"]["result"]
    os.kill(int(pid), signal.SIGKILL)
    assert panel.reply(request)["status"] == "error"
    panel.event("terminated")
    assert "has ended" in panel.ask("threads", fails=True)["message"]
    assert "bring it back: %mesh heal" in panel.ask("initialize", fails=True)["message"]
    panel.do("%mesh heal")
    panel.attach()
    panel.set_breakpoint(cell, 4)
    request = panel.run(cell)
    panel.event("stopped")
    panel.ask("disconnect")
    assert panel.reply(request)["status"] == "ok"
