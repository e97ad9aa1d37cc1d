"""The health widget in a stock ipykernel, without a browser: what goes out, and what comes in while a cell runs."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator
from typing import Any

import pytest
from stock_kernel import TIMEOUT_S, StockKernel, with_extension

pytest.importorskip("anywidget")

WIDGET_VIEW = "application/vnd.jupyter.widget-view+json"


class FrontEnd(StockKernel):
    """Executes cells and speaks to widgets, as JupyterLab does; keeps all messages in order."""

    def __init__(self) -> None:
        super().__init__()
        self.messages: list[dict[str, Any]] = []

    def run(self, code: str) -> list[dict[str, Any]]:
        """Execute a cell that must succeed; returns its messages."""
        request = self.execute(code)
        return self.wait_for(request)

    def wait_for(self, request: str, status: str = "ok") -> list[dict[str, Any]]:
        self.until(lambda: any(_is_idle(m, request) for m in self.messages))
        while (reply := self.client.get_shell_msg(timeout=TIMEOUT_S))["parent_header"].get("msg_id") != request:
            pass
        assert reply["content"]["status"] == status, reply["content"]
        return [m for m in self.messages if m["parent_header"].get("msg_id") == request]

    def until(self, condition: Any, timeout_s: float = TIMEOUT_S) -> None:
        deadline = time.monotonic() + timeout_s
        while not condition():
            left = deadline - time.monotonic()
            assert left > 0, [(m["msg_type"], m["content"]) for m in self.messages[-5:]]
            if self.client.iopub_channel.socket.poll(min(left, 0.1) * 1000):
                self.messages.append(self.client.iopub_channel.get_msg(timeout=1))

    def send(self, model: str, content: dict[str, Any]) -> None:
        """What ``model.send(content)`` in the browser sends."""
        data = {"method": "custom", "content": content}
        message = self.client.session.msg("comm_msg", {"comm_id": model, "data": data})
        self.client.shell_channel.send(message)

    def updates(self, model: str) -> list[dict[str, Any]]:
        """The live parts that came for a widget."""
        return [
            m["content"]["data"]["state"]["live"]
            for m in self.messages
            if m["msg_type"] == "comm_msg"
            and m["content"]["comm_id"] == model
            and "live" in m["content"]["data"].get("state", {})
        ]

    def answers(self, model: str) -> list[dict[str, Any]]:
        """What came back for buttons."""
        return [
            m["content"]["data"]["content"]
            for m in self.messages
            if m["msg_type"] == "comm_msg"
            and m["content"]["comm_id"] == model
            and m["content"]["data"]["method"] == "custom"
        ]


@contextlib.contextmanager
def looking(front: FrontEnd, model: str) -> Iterator[None]:
    """Somebody looks at the widget."""
    front.send(model, {"kind": "look", "view": "a", "visible": True})
    yield
    front.send(model, {"kind": "look", "view": "a", "visible": False})


def states(front: FrontEnd, model: str, expected: str, timeout_s: float = 20) -> None:
    """Wait until the ranks are shown in these states."""
    front.until(lambda: front.updates(model)[-1:] and front.updates(model)[-1]["states"] == expected, timeout_s)


def press(front: FrontEnd, model: str, action: str, ranks: list[int]) -> dict[str, Any]:
    """Press a button; returns the answer."""
    before = len(front.answers(model))
    front.send(model, {"kind": "act", "action": action, "ranks": ranks})
    front.until(lambda: len(front.answers(model)) > before)
    return front.answers(model)[-1]


def _is_idle(message: dict[str, Any], request: str) -> bool:
    return (
        message["msg_type"] == "status"
        and message["content"]["execution_state"] == "idle"
        and message["parent_header"].get("msg_id") == request
    )


@pytest.fixture(scope="module")
def front(jupyter_loop: None, tmp_path_factory: pytest.TempPathFactory) -> Iterator[FrontEnd]:
    with with_extension(FrontEnd, tmp_path_factory) as front:
        front.run("%mesh spawn hosts=1 gpus=4 --device cpu")
        front.run("%%mesh\nimport time")
        yield front


@pytest.fixture(scope="module")
def model(front: FrontEnd) -> str:
    """The widget's model, shown once."""
    return _show(front)


def _show(front: FrontEnd) -> str:
    (shown,) = [m for m in front.run("%mesh") if m["msg_type"] == "display_data"]
    return str(shown["content"]["data"][WIDGET_VIEW]["model_id"])


def test_the_widget_comes_with_text_and_html(front: FrontEnd) -> None:
    (shown,) = [m for m in front.run("%mesh top") if m["msg_type"] == "display_data"]
    data = shown["content"]["data"]
    assert data["text/plain"].startswith('mesh "main": hosts=1, gpus=4, cpu; 4 ranks on 1 host')
    assert data["text/html"].count("<tr ") == 5 and "4 idle" in data["text/html"]
    assert data[WIDGET_VIEW]["model_id"]


def test_text_is_printed_where_it_is_wanted(front: FrontEnd) -> None:
    for cell in ("%mesh status --text", "%%capture --no-stderr x\n%mesh"):
        messages = front.run(cell)
        assert not [m for m in messages if m["msg_type"] == "display_data"]
    front.run("assert x.stdout.startswith('mesh \"main\"')")


def test_the_same_ranks_get_the_same_widget(front: FrontEnd, model: str) -> None:
    assert _show(front) == model


def test_nothing_is_asked_while_nobody_looks(front: FrontEnd, model: str) -> None:
    ticking = "[t for t in threading.enumerate() if t.name == 'meshbook.widget']"
    front.run(f"import threading, time; assert not {ticking}")
    front.send(model, {"kind": "look", "view": "a", "visible": True})
    before = len(front.updates(model))
    front.until(lambda: len(front.updates(model)) > before + 1, timeout_s=20)
    front.send(model, {"kind": "look", "view": "a", "visible": False})
    front.until(lambda: front.updates(model)[-1]["phase"] == "paused", timeout_s=20)
    front.run(
        f"deadline = time.monotonic() + 5\nwhile {ticking} and time.monotonic() < deadline: time.sleep(.02)\n"
        f"assert not {ticking}"
    )


def test_updates_come_and_buttons_act_while_a_cell_runs(front: FrontEnd, model: str) -> None:
    with looking(front, model):
        request = front.execute("%%mesh\nimport time\nprint('begun')\ntime.sleep(60)")
        states(front, model, "BBBB")
        live = front.updates(model)[-1]
        assert live["cells"][0]["what"].startswith("cell ") and live["cells"][0]["ended"] == 0
        assert any("time.sleep" in text for text in live["texts"])

        front.send(model, {"kind": "act", "action": "stacks", "ranks": [1, 2]})
        front.until(lambda: front.answers(model), timeout_s=20)
        assert front.answers(model)[-1]["text"].startswith("[1,2] busy for ")

        pressed = time.monotonic()
        front.send(model, {"kind": "act", "action": "interrupt", "ranks": []})
        messages = front.wait_for(request, status="error")
        assert time.monotonic() - pressed < 20  # the cell would run for 60
        assert [m["content"]["ename"] for m in messages if m["msg_type"] == "error"] == ["CallInterrupted"]
        states(front, model, "IIII")


def test_the_output_is_brought_up_to_date_when_nobody_looks(front: FrontEnd, model: str) -> None:
    front.send(model, {"kind": "look", "view": "g", "visible": True})
    request = front.execute("%%mesh\nimport time\ntime.sleep(3)")
    states(front, model, "BBBB")
    front.send(model, {"kind": "look", "view": "g", "visible": False})

    def updates() -> list[dict[str, Any]]:  # a slow spawn shows its progress by such messages as well
        shown = (m["content"]["data"] for m in front.messages if m["msg_type"] == "update_display_data")
        return [data for data in shown if WIDGET_VIEW in data]

    front.until(updates, timeout_s=20)
    update = updates()[0]
    assert "4 busy" in update["text/html"] and "time.sleep" in update["text/plain"]
    assert update[WIDGET_VIEW]["model_id"] == model
    front.wait_for(request)


def test_ranks_in_a_collective_are_told_from_the_one_that_is_not(front: FrontEnd, model: str) -> None:
    with looking(front, model):
        request = front.client.execute(
            "%%mesh\nimport time\nif rank == 0: time.sleep(3)\ndist.barrier()", allow_stdin=False
        )
        front.until(lambda: any(live["states"] == "BCCC" for live in front.updates(model)), timeout_s=20)
        front.wait_for(request)


def test_a_page_opens_its_panel_while_a_cell_runs(front: FrontEnd) -> None:
    def heard(kind: str) -> list[dict[str, Any]]:
        told = (m["content"] for m in front.messages if m["msg_type"] == "comm_msg")
        return [each["data"] for each in told if each["comm_id"] == "page" and each["data"].get("kind") == kind]

    def send(kind: str, content: dict[str, Any]) -> None:
        front.client.shell_channel.send(front.client.session.msg(kind, {"comm_id": "page", **content}))

    request = front.execute("%%mesh\nimport time\ntime.sleep(60)")
    send("comm_open", {"target_name": "meshbook", "data": {}})
    front.until(lambda: heard("session"), timeout_s=20)
    assert heard("session")[0] | {"kind": "session"} == {
        "kind": "session",
        "mesh": "main",
        "text": "hosts=1, gpus=4",
        "auto": False,
    }
    send("comm_msg", {"data": {"kind": "look", "view": "p", "visible": True}})
    front.until(lambda: any(told["live"].get("states") == "BBBB" for told in heard("live")), timeout_s=20)
    assert heard("layout")[0]["layout"]["name"] == "main"
    send("comm_msg", {"data": {"kind": "act", "action": "variables", "ranks": []}})
    front.until(lambda: heard("answer"), timeout_s=20)
    assert heard("answer")[0]["table"][0][0] == "name"
    assert not any(_is_idle(m, request) for m in front.messages)
    send("comm_msg", {"data": {"kind": "act", "action": "interrupt", "ranks": []}})
    front.wait_for(request, status="error")
    front.until(lambda: heard("live")[-1]["live"]["say"]["text"] == "idle", timeout_s=20)
    send("comm_msg", {"data": {"kind": "look", "view": "p", "visible": False}})
    front.until(lambda: heard("live")[-1]["live"]["phase"] == "paused", timeout_s=20)
    send("comm_close", {"data": {}})
    front.run("from meshbook_extension.widget.panel import Panels as Of")
    front.run("assert not get_ipython()._meshbook_session.part(Of)._pages")


def test_what_the_process_groups_move_is_told(front: FrontEnd, model: str) -> None:
    with looking(front, model):
        request = front.client.execute(
            "%%mesh\nx = torch.zeros(250_000)\nfor _ in range(25):\n    dist.all_reduce(x); time.sleep(0.1)",
            allow_stdin=False,
        )
        front.until(lambda: any(min(live["moved_kb_s"]) > 100 for live in front.updates(model)), timeout_s=20)
        front.wait_for(request)
        history = front.updates(model)[-1]["history"]
        assert history["memory_mb"] and max(high for _, _, high in history["moved_kb_s"]) > 100


def test_cells_sent_meanwhile_run_in_order(front: FrontEnd, model: str) -> None:
    """Under ipykernel 6 the widget reads the socket in which other requests wait."""
    front.run("order = []")
    first = front.execute("%%mesh\nimport time\ntime.sleep(1.5)")
    later = [front.execute(f"order.append({i})") for i in range(3)]
    front.send(model, {"kind": "act", "action": "stacks", "ranks": []})
    for request in (first, *later):
        front.until(lambda request=request: any(_is_idle(m, request) for m in front.messages))
    while front.client.shell_channel.socket.poll(200):
        front.client.shell_channel.get_msg(timeout=1)
    front.run("assert order == [0, 1, 2], order")


def test_a_job_is_cancelled_by_the_interrupt_button(front: FrontEnd, model: str) -> None:
    with looking(front, model):
        front.run("%%mesh --async\nimport time\ntime.sleep(60)")
        states(front, model, "BBBB")
    assert "ranks 0-3 stopped" in press(front, model, "interrupt", [])["text"]
    request = front.execute("%mesh wait 1")
    front.wait_for(request, status="error")


def test_a_rank_that_does_not_obey_is_told_and_insisting_frees_it(front: FrontEnd, model: str) -> None:
    with looking(front, model):
        request = front.execute(
            "%%mesh\nimport time\nwhile rank == 0:\n    try:\n        time.sleep(20)\n        break\n"
            "    except KeyboardInterrupt: pass"
        )
        states(front, model, "BIII")
        front.send(model, {"kind": "act", "action": "interrupt", "ranks": []})
        front.wait_for(request, status="error")
        states(front, model, "XIII")
        front.send(model, {"kind": "act", "action": "interrupt", "ranks": []})
        states(front, model, "IIII")


def test_errors_and_progress_are_told(front: FrontEnd, model: str) -> None:
    failing = front.execute("%%mesh\nif rank == 2: raise ValueError('bad <b>shard</b>')")
    front.wait_for(failing, status="error")
    request = front.client.execute(
        "%%mesh\nimport sys, time\n"
        "for i in range(40):\n"
        "    print(f'\\repoch 1: {10 * (rank + 1)}%|###   | {10 * (rank + 1)}/100 [00:01<00:09, 1.0it/s]', end='',"
        " file=sys.stderr, flush=True); time.sleep(.1)",
        allow_stdin=False,
    )
    with looking(front, model):
        front.until(
            lambda: any(cell["progress"] for live in front.updates(model) for cell in live["cells"]), timeout_s=20
        )
        live = front.updates(model)[-1]
        progress = live["cells"][0]["progress"]
        assert progress["title"] == "epoch 1" and progress["ranks"] == 4 and progress["slowest"] == 0
        assert progress["mean"] == pytest.approx(0.25) and progress["left"] == "00:09"
        (error,) = [error for error in live["errors"] if "shard" in error["text"]]
        assert (error["ranks"], error["text"]) == ("2", "ValueError: bad <b>shard</b>")
        front.wait_for(request)


def test_the_pdb_button_stops_a_rank_in_the_running_cell_and_tells_of_stopped_ones(front: FrontEnd, model: str) -> None:
    with looking(front, model):
        request = front.client.execute(
            "%%mesh\nimport time\ngoes_on = True\nwhile goes_on and rank == 2:\n    time.sleep(0.05)", allow_stdin=True
        )
        states(front, model, "IIBI")
        told = press(front, model, "pdb", [2])
        assert told["text"].startswith("rank 2 stops at the next line of your code; the prompt opens below cell ")
        states(front, model, "IIPI")
        assert front.client.get_stdin_msg(timeout=TIMEOUT_S)["msg_type"] == "input_request"
        told = press(front, model, "pdb", [])
        assert told["text"].startswith("rank 2 stopped at cell ") and "; the prompt is open below cell " in told["text"]

        front.client.input("detach")
        front.wait_for(request)
        told = press(front, model, "pdb", [])
        assert told["copied"] == "%mesh pdb rank=2" and told["text"].endswith(told["copied"])
        front.run("%mesh pdb --cast 'goes_on = False'\n%mesh pdb --cast c")
        states(front, model, "IIII")
        assert "nothing runs on ranks 0-3" in press(front, model, "pdb", [])["text"]


@pytest.mark.parametrize("module", ["tqdm", "tqdm.auto", "tqdm.notebook"])
def test_a_bar_of_tqdm_on_all_ranks_is_one_bar(front: FrontEnd, model: str, module: str) -> None:
    with looking(front, model):
        before = len(front.updates(model))
        request = front.client.execute(
            f"%%mesh\nfrom {module} import tqdm\nfor _ in tqdm(range(20), desc='epoch'):\n    time.sleep(0.1)",
            allow_stdin=False,
        )
        messages = front.wait_for(request)
        cells = [cell for live in front.updates(model)[before:] for cell in live["cells"] if cell["progress"]]
        assert ("epoch", 4) in {(cell["progress"]["title"], cell["progress"]["ranks"]) for cell in cells}
        bars = [m["content"]["data"]["text/plain"] for m in messages if m["msg_type"].endswith("display_data")]
        assert any(bar.startswith("[0-3] epoch:") and "/20 [" in bar for bar in bars)
        assert not [bar for bar in bars if "\n" in bar]
        ended = "".join(m["content"]["text"] for m in messages if m["msg_type"] == "stream").splitlines()
        assert 1 <= len(ended) <= 4 and all(
            "] epoch: 100%|" in line for line in ended
        )  # one, if the ranks end together


def test_a_dead_rank_is_told_and_healed(front: FrontEnd, model: str) -> None:
    with looking(front, model):
        front.until(lambda: front.updates(model), timeout_s=60)
        request = front.execute("%%mesh rank=1\nimport os; os._exit(3)")
        front.wait_for(request, status="error")

        def ends() -> list[dict[str, Any]]:
            return [error for error in front.updates(model)[-1]["errors"] if error["text"].startswith("ended: ")]

        front.until(lambda: front.updates(model)[-1]["states"] == "IDII" and ends(), timeout_s=60)
        (error,) = ends()
        assert error["ranks"] == "1" and "exit" in error["text"]
        answer = press(front, model, "heal", [])
        assert answer["action"] == "heal"
        assert answer["text"].startswith('mesh "main": rank 1 started again, all 4 ranks joined')
        states(front, model, "IIII", 60)


def test_a_stopped_mesh_ends_the_widget(front: FrontEnd, model: str) -> None:
    front.send(model, {"kind": "look", "view": "d", "visible": True})
    front.until(lambda: front.updates(model)[-1]["phase"] == "live", timeout_s=20)
    front.run("%mesh stop")
    front.until(lambda: front.updates(model)[-1]["phase"] == "ended", timeout_s=20)
    assert "stopped" in front.updates(model)[-1]["note"]
