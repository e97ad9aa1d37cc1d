"""The visual debugger, as JupyterLab's panel uses it, in our kernel and in a stock one."""

from __future__ import annotations

import pytest
from panel_client import Panel

CELL = "%%mesh\ny = 1\nfor i in range(3):\n    y += i * rank\nprint('y', y)"


@pytest.fixture(params=["meshbook", "python3"])
def panel(request, start_kernel) -> Panel:
    """A panel on a kernel whose mesh has two ranks."""
    kernel = start_kernel(request.param)
    panel = Panel(kernel.client)
    if request.param == "python3":
        panel.do("%load_ext meshbook")
    panel.do("%mesh spawn gpus=2 --device cpu")
    return panel


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
