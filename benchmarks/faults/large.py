"""Large messages of every kind: values arrive, text is cut and counted, what no link carries is refused."""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping

from benchmarks.faults.findings import Findings
from meshbook import ProcMesh, errors, this_host
from meshbook.actor import Actor, endpoint
from meshbook.calls.output import OutputDropped, OutputEvent, OutputTarget, StreamText
from meshbook.mesh.driven import set_front_end
from meshbook.mesh.proc_view import new_output_id
from meshbook.mesh.prompt import DebugPrompt
from meshbook.mesh.rank_calls import start_cell
from meshbook.system.processes import resident_bytes
from meshbook.wire.frames import MAX_FRAME_BYTES

DEADLINE_S = 60.0
MAX_GROWTH_BYTES = 256 << 20
"""What the agent may keep of all that was printed: a frame as large as there are, and copies of it."""
LARGEST_PROMPT = 4 << 20
SIZES = (1 << 16, 1 << 20, (1 << 20) + 1, 10 << 20, MAX_FRAME_BYTES - 1000, MAX_FRAME_BYTES + 1, 70 << 20)


class Loud(Actor):
    """Prints, takes and returns as much as it is told."""

    @endpoint
    def say(self, size: int) -> int:
        print("x" * size)
        return size

    @endpoint
    def double(self, text: str) -> str:
        return text + text

    @endpoint
    def fail(self, size: int) -> None:
        raise ValueError("x" * size)


class Loads:
    """One mesh, and what can be large in it."""

    def __init__(self, mesh: ProcMesh) -> None:
        self.mesh = mesh
        self.loud = mesh.spawn("loud", Loud)
        self.heard: list[OutputEvent] = []
        self._use_front_end()
        self.ways: tuple[Callable[[int], object], ...] = (
            self.value, self.result, self.argument, self.printed, self.printed_late, self.printed_by_an_actor,
            self.shown, self.error, self.error_of_an_actor, self.name_of_an_error, self.label, self.stored, self.prompt,
        )  # fmt: skip

    def _use_front_end(self, typist: _Typist | None = None) -> None:
        set_front_end(
            output_source=lambda procs: OutputTarget(new_output_id(procs), self.heard.append), prompt_handler=typist
        )

    def value(self, size: int) -> None:
        self.mesh.push({"text": "x" * size}).get(DEADLINE_S)
        assert self.mesh.evaluate("len(text)").get(DEADLINE_S).values() == [size, size]

    def result(self, size: int) -> None:
        assert [len(text) for text in self.mesh.execute(_repeat, size).get(DEADLINE_S).values()] == [size, size]

    def argument(self, size: int) -> None:
        assert [len(text) for text in self.loud.double.call("x" * size).get(DEADLINE_S).values()] == [2 * size] * 2

    def printed(self, size: int) -> None:
        self._told(size, f"print('x' * {size})")

    def printed_late(self, size: int) -> None:
        code = f"import threading\nt = threading.Thread(target=print, args=('x' * {size},)); t.start(); t.join()"
        self._told(size, code)

    def printed_by_an_actor(self, size: int) -> None:
        self.heard.clear()
        self.loud.say.call(size).get(DEADLINE_S)
        self._compare(size, self.heard)

    def _told(self, size: int, code: str) -> None:
        events: list[OutputEvent] = []
        start_cell(self.mesh, code, on_output=events.append).future.get(DEADLINE_S)
        self._compare(size, events)

    def _compare(self, size: int, events: list[OutputEvent]) -> None:
        """All of it is shown or counted."""
        shown = sum(len(each.text) for each in events if isinstance(each, StreamText) and each.rank == 0)
        cut = max([each.size_bytes for each in events if isinstance(each, OutputDropped) and each.rank == 0], default=0)
        assert shown + cut == size + 1, (size, shown, cut)

    def shown(self, size: int) -> None:
        code = f"display({{'text/html': 'x' * {size}, 'application/json': ['y' * {size}]}}, raw=True)"
        self.mesh.run(code).get(DEADLINE_S)

    def error(self, size: int) -> None:
        self._fails(lambda: self.mesh.execute(_raise, size).get(DEADLINE_S))

    def error_of_an_actor(self, size: int) -> None:
        self._fails(lambda: self.loud.fail.call(size).get(DEADLINE_S))

    def name_of_an_error(self, size: int) -> None:
        self._fails(lambda: self.mesh.run(f"raise type('x' * {size}, (Exception,), {{}})").get(DEADLINE_S))

    def label(self, size: int) -> None:
        assert self.mesh.evaluate(f"1{' ' * size}").get(DEADLINE_S).values() == [1, 1]

    def stored(self, size: int) -> None:
        """In the store of the process groups, where a value is one message."""
        code = f"s = dist.distributed_c10d._get_default_store()\ns.set('large', 'x' * {size}); len(s.get('large'))"
        if size < MAX_FRAME_BYTES - 100:
            assert self.mesh.slice(gpus=0).run(code).get(DEADLINE_S).values() == [size]
        else:
            self._fails(lambda: self.mesh.slice(gpus=0).run(code).get(DEADLINE_S))

    def prompt(self, size: int) -> None:
        """What pdb shows, and a command that is typed there."""
        completer = _Typist(f"p 'x' * {size}", f"count = {size}  # {'x' * size}", "c")
        self._use_front_end(completer)
        try:
            self.mesh.run("breakpoint()").get(DEADLINE_S)
        finally:
            self._use_front_end()
        assert min(size, 1000) <= completer.shown <= LARGEST_PROMPT, completer.shown

    def _fails(self, call: Callable[[], object]) -> None:
        try:
            call()
        except errors.CallFailed as failed:
            assert len(str(failed)) < 1 << 20
        else:
            raise AssertionError("it has not failed")


class _Typist:
    """Somebody who types some lines, for each rank the last of them, and counts what is shown."""

    def __init__(self, *lines: str) -> None:
        self.lines, self.shown = list(lines), 0

    def refusal(self) -> str:
        return ""

    def attend(self, procs: ProcMesh, is_over: Callable[[], bool]) -> bool:
        return DebugPrompt(procs, self).attend(is_over)

    def show(self, texts: Mapping[int, str]) -> None:
        self.shown += sum(map(len, texts.values()))

    def say(self, text: str) -> None:
        self.shown += len(text)

    def read(self, prompt: str, is_open: Callable[[], bool], *, hidden: bool = False) -> str:
        return self.lines.pop(0) if len(self.lines) > 1 else self.lines[0]


def _repeat(size: int) -> str:
    return "x" * size


def _raise(size: int) -> None:
    raise ValueError("x" * size)


def run_large(seed: int, count: int) -> Findings:
    """``count`` messages of sizes around the limits."""
    findings, draw = Findings("large", f"{count:,} large messages, seed {seed}"), random.Random(seed)
    with findings.running(), this_host().spawn_procs({"gpus": 2}, name="large", device="cpu") as mesh:
        loads = Loads(mesh)
        loads.printed_by_an_actor(1)
        agent = mesh._mesh.hosts[0].launched.pid
        before = resident_bytes(agent)
        findings.try_ways(mesh, loads.ways, lambda: draw.choice(SIZES), draw, count)
        if (grown := resident_bytes(agent) - before) > MAX_GROWTH_BYTES:
            findings.left.append(f"{grown >> 20} MiB of memory in the agent")
    set_front_end()
    return findings
