"""Text that is not UTF-8, or means something to a terminal, at every border: it comes as it is, or with backslashes."""

from __future__ import annotations

import os
import random
from collections.abc import Callable
from typing import Any

from benchmarks.faults.findings import Findings
from meshbook import ProcMesh, this_host
from meshbook.actor import Actor, ActorError, endpoint
from meshbook.calls.output import DisplayData, OutputEvent, OutputTarget, StreamText
from meshbook.errors import CallFailed
from meshbook.formatting import utf8_text
from meshbook.mesh.driven import set_front_end
from meshbook.mesh.proc_view import ask, new_output_id
from meshbook.mesh.rank_calls import start_cell

DEADLINE_S = 30.0
_VARIABLE = b"MESHBOOK_STRANGE"
_PIECES = (
    "\udce9", "\ud83d", "\udfff\ud800", "é", "\U0001f525", "\u202e", "\x1b[31m", "\x1e", "\x1e0123456789abcdef:7\n",
    "\r", "\n", "\t", "\x7f", "\x85", "\u2028", "'", '"', "\\", "{}", "%s", "a", "line", "\ufeff", "\ufffe",
)  # fmt: skip


class Echo(Actor):
    """Says what it hears, in every way that an actor has."""

    @endpoint
    def say(self, text: str) -> str:
        print(text)
        return text

    @endpoint
    def fail(self, text: str) -> None:
        raise ValueError(text)


class Borders:
    """One mesh, and a way for each border to send a text across it and to look at what came."""

    def __init__(self, mesh: ProcMesh) -> None:
        self.mesh = mesh
        self.echo = mesh.spawn("echo", Echo)
        self.heard: list[OutputEvent] = []
        set_front_end(output_source=lambda procs: OutputTarget(new_output_id(procs), self.heard.append))
        self.ways: tuple[Callable[[str], object], ...] = (
            self.value, self.label, self.error, self.printed, self.printed_late, self.shown, self.raw_bytes, self.file,
            self.actor, self.actor_name, self.actor_error, self.question, self.logs, self.environment,
        )  # fmt: skip

    def value(self, text: str) -> None:
        self.mesh.push({"text": text}).get(DEADLINE_S)
        assert self.mesh.pull("text").get(DEADLINE_S).values() == [text] * len(self.mesh.ranks)

    def label(self, text: str) -> None:
        try:
            self.mesh.evaluate(f"len({text!r}) or {text}").get(DEADLINE_S)
        except CallFailed:  # most are no expression
            pass

    def error(self, text: str) -> None:
        try:
            self.mesh.execute(_raise, text).get(DEADLINE_S)
        except CallFailed as failed:
            assert failed.failures[0].evalue == utf8_text(text), failed.failures[0].evalue
        else:
            raise AssertionError("it has not failed")

    def printed(self, text: str) -> None:
        self._printed("print(text)", text)

    def printed_late(self, text: str) -> None:
        self._printed("import threading\nt = threading.Thread(target=print, args=(text,)); t.start(); t.join()", text)

    def _printed(self, code: str, text: str) -> None:
        self.value(text)
        said = "".join(each.text for each in self._events(code) if isinstance(each, StreamText) and each.rank == 0)
        if "\x1e" not in text:  # else part of it may have looked like our own marker
            assert said == utf8_text(text) + "\n", said

    def shown(self, text: str) -> None:
        self.value(text)
        code = "display({'text/plain': text, text: text, 7: [text]}, raw=True, metadata={text: {text: text}})"
        shown = [each for each in self._events(code) if isinstance(each, DisplayData) and each.rank == 0]
        assert shown[0].data["text/plain"] == utf8_text(text), shown

    def raw_bytes(self, text: str) -> None:
        self.mesh.run(f"os.write(1, {text.encode(errors='surrogatepass')!r}); None").get(DEADLINE_S)

    def file(self, text: str) -> None:
        try:
            self.mesh.execute(_raise_in, text.replace("\0", "")).get(DEADLINE_S)
        except CallFailed as failed:
            assert failed.failures[0].ename == "ZeroDivisionError"

    def actor(self, text: str) -> None:
        self.heard.clear()
        assert self.echo.say.call(text).get(DEADLINE_S).values() == [text] * len(self.mesh.ranks)
        said = "".join(each.text for each in self.heard if isinstance(each, StreamText) and each.rank == 0)
        assert said == utf8_text(text) + "\n", said

    def actor_name(self, text: str) -> None:
        echo = self.mesh.spawn(text, Echo)
        assert echo.say.call("").get(DEADLINE_S).values() == [""] * len(self.mesh.ranks)
        assert {each.name for each in self.mesh.actors()} == {"echo", utf8_text(text)}
        echo.stop().get(DEADLINE_S)

    def actor_error(self, text: str) -> None:
        try:
            self.echo.fail.call(text).get(DEADLINE_S)
        except ActorError as failed:
            assert utf8_text(text) in str(failed), str(failed)
        else:
            raise AssertionError("it has not failed")

    def question(self, text: str) -> None:
        assert len(ask(self.mesh, object, "complete", f"x = 1\n{text}", len(text), timeout_s=DEADLINE_S)) == len(
            self.mesh.ranks
        )

    def logs(self, text: str) -> None:
        assert len(self.mesh.logs(containing=text)) == len(self.mesh.ranks)

    def environment(self, text: str) -> None:
        """Another mesh, since an environment is that of its beginning."""
        value = text.replace("\0", "").encode(errors="surrogatepass")
        os.environb[_VARIABLE] = value
        try:
            with this_host().spawn_procs({"gpus": 1}, name="strange", device="cpu", group=False) as mesh:
                assert mesh.execute(_variable).get(DEADLINE_S).values() == [value]
        finally:
            del os.environb[_VARIABLE]

    def _events(self, code: str) -> list[OutputEvent]:
        events: list[OutputEvent] = []
        start_cell(self.mesh, code, on_output=events.append).future.get(DEADLINE_S)
        return events


def _raise(text: str) -> None:
    raise ValueError(text)


def _raise_in(name: str) -> Any:
    return eval(compile("1 / 0", name, "eval"))


def _variable() -> bytes:
    return os.environb[_VARIABLE]


def strange_text(draw: random.Random) -> str:
    """A few pieces, most of which some decoder somewhere refuses or takes for something else."""
    return "".join(draw.choice(_PIECES) for _ in range(draw.randint(1, 6)))


def run_texts(seed: int, count: int) -> Findings:
    """``count`` texts, each across one border."""
    findings, draw = Findings("texts", f"{count:,} strange texts, seed {seed}"), random.Random(seed)
    with (
        findings.running(),
        this_host().spawn_procs({"gpus": 2}, name="texts", device="cpu", group=False) as mesh,
    ):
        mesh.run("import os").get(DEADLINE_S)
        findings.try_ways(mesh, Borders(mesh).ways, lambda: strange_text(draw), draw, count)
    set_front_end()
    return findings
