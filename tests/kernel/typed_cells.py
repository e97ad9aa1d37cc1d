"""Cells whose prompts are answered, as by a person who types into their stdin."""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Sequence

from tests.kernel.conftest import CELL_TIMEOUT_S, Cell, Kernel


class Typed(Cell):
    """A cell whose prompts were answered."""

    def __init__(self) -> None:
        super().__init__()
        self.prompts: list[str] = []
        self.hidden: list[str] = []
        """The prompts whose answers are not shown."""

    @property
    def plain(self) -> str:
        """All that was shown, without colours, with the prompts and what was typed where they came."""
        shown = (content.get("data", {}).get("text/plain", content.get("text", "")) for _, content in self.messages)
        return re.sub(r"\x1b\[[0-9;]*m", "", "".join(shown))


Answer = str | Callable[[Kernel], object]
"""What is typed; or what happens while the prompt stands, unanswered."""


def run_typing(kernel: Kernel, code: str, answers: Sequence[Answer], limit_s: float = CELL_TIMEOUT_S) -> Typed:
    """Run a cell and answer its prompts; one more prompt than there are answers fails the test."""
    cell, left, client = Typed(), list(answers), kernel.client
    request = client.execute(code, allow_stdin=True, stop_on_error=False)
    deadline = time.monotonic() + limit_s
    ended: set[str] = set()

    def listen() -> None:
        assert time.monotonic() < deadline, f"{cell.plain}\nprompts: {cell.prompts}, never asked for: {left}"
        while client.iopub_channel.msg_ready():
            message = client.get_iopub_msg(timeout=1)
            parent = message["parent_header"].get("msg_id", "")
            if message["msg_type"] == "status":
                if message["content"]["execution_state"] == "idle":
                    ended.add(parent)
            elif parent == request:
                cell.add(message)

    while not (cell.reply and request in ended):
        listen()
        if client.stdin_channel.msg_ready():
            content = client.get_stdin_msg(timeout=1)["content"]
            prompt = content["prompt"]
            mark = client.session.msg("kernel_info_request")
            client.control_channel.send(mark)
            while mark["header"]["msg_id"] not in ended:  # what was shown before the prompt comes by another socket
                listen()
                time.sleep(0.005)
            cell.prompts.append(prompt)
            cell.hidden += [prompt] if content["password"] else []
            assert left, f"{cell.plain}\nnobody answers {prompt!r}"
            answer = left.pop(0)
            text = answer if isinstance(answer, str) else ""
            cell.messages.append(("typed", {"text": f"{prompt}{text}\n"}))
            if isinstance(answer, str):
                client.input(answer)
            else:
                answer(kernel)
        if client.shell_channel.msg_ready():
            message = client.get_shell_msg(timeout=1)
            if message["parent_header"].get("msg_id") == request:
                cell.reply = message["content"]
        time.sleep(0.005)
    assert not left, f"{cell.plain}\nnever asked for: {left}"
    return cell
