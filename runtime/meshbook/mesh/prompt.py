"""The prompt of stopped ranks, and its place in a script: the terminal, where lines about a mesh are printed, too.

One rank is the current one; pdb's commands go to it. The prompt's own commands are in `_HELP`. A `Terminal` shows text
and reads lines: a notebook's cell, a script's console, a test. All of it runs on the thread of the person who waits.
"""

from __future__ import annotations

import contextlib
import getpass
import re
import sys
import threading
import time
from collections.abc import Callable, Collection, Mapping
from typing import Protocol

from meshbook.actor.supervision import MeshFailure
from meshbook.calls.call import OpenCall
from meshbook.concurrency import forks
from meshbook.controller.controller import Controller, OutputSource
from meshbook.controller.mesh_state import MeshState
from meshbook.errors import LeftStopped, MeshError, UsageError
from meshbook.errors.advice import advice
from meshbook.formatting import format_ranks, group_ranks, name_ranks
from meshbook.mesh.proc_mesh import ProcMesh
from meshbook.mesh.states import busy as busy_ranks
from meshbook.mesh.states import stopped_ranks, type_line, where
from meshbook.wire.messages import ASKS_SECRET, END_OF_INPUT, AtPrompt

_HELP = """\
Beside pdb's own commands, this prompt knows:
  rank N             go to another stopped rank; when a rank goes on, the next one comes by itself
  ranks              who is stopped where, who waits in which collective, who runs
  cast CMD [TARGET]  CMD on all stopped ranks, or those of TARGET: cast p x    cast c    cast p loss rank=0,2
  ?prefix            names that begin so: ?lo    ?model.la
  detach             leave the ranks stopped and have the notebook back; {prompt} opens the prompt again
  q                  end the cell on this rank, quietly; c goes on; interrupt ends the cell on all ranks
A variable with such a name: !ranks"""

GATHER_S = 0.15
"""An opening prompt waits this long, so that ranks which stop a moment later are shown with it."""
QUESTION_S, AGAIN_S = 0.5, 2.0
"""A question of a program waits so long for others that ask the same; and for those that asked the last one with it."""
STEP_S = 1.0
"""A rank that steps has so long to stop again before another one's turn comes."""
LOOK_S = 0.05

_GOES_ON = re.compile(r"(c|cont|continue|q|quit|exit)\s*$")
_TARGET = re.compile(r"(\w+)=([\w:,-]+)")

Chooser = Callable[[ProcMesh, Mapping[str, str]], ProcMesh]
"""The part of a mesh that ``axis=value`` pairs name; see `meshbook_extension.notebook.targets.choose`."""


class Terminal(Protocol):
    """The place where a person reads and types."""

    def show(self, texts: Mapping[int, str]) -> None:
        """Show the texts of ranks' debuggers, each under its rank, equal texts once."""

    def say(self, text: str) -> None:
        """Show words of the prompt itself."""

    def read(self, prompt: str, is_open: Callable[[], bool], *, hidden: bool = False) -> str | None:
        """Return a line; None if it was given up since ``is_open()`` is false. hidden: what is typed is not shown.

        Raises: KeyboardInterrupt, EOFError.
        """


def choose_ranks(view: ProcMesh, pairs: Mapping[str, str]) -> ProcMesh:
    """The chooser without a notebook: ``rank=0,2`` alone."""
    if set(pairs) != {"rank"} or not re.fullmatch(r"\d+(,\d+)*", pairs["rank"]):
        raise UsageError("a target is rank=0,2 here.")
    return view.select([int(rank) for rank in pairs["rank"].split(",")])


class DebugPrompt:
    """The prompt of some ranks, as long as one person stays with them."""

    def __init__(
        self, procs: ProcMesh, terminal: Terminal, choose: Chooser = choose_ranks, *, post_mortem: bool = False
    ) -> None:
        self.procs = procs
        self.current: int | None = None
        self._terminal, self._choose, self._post_mortem = terminal, choose, post_mortem
        self._stopped_ranks = stopped_ranks(procs)
        self._line_was_pdbs = False
        """Whether an empty line repeats something."""
        self._answered: frozenset[int] = frozenset()
        """The ranks that got the last answer to a question."""

    @property
    def wanted(self) -> bool:
        """Whether a rank is stopped whose prompt nobody has left."""
        return bool(self._stopped_ranks) and not self._stopped_ranks.left.issuperset(
            self._stopped_ranks.of(self.procs.ranks)
        )

    def attend(self, is_over: Callable[[], bool], first: int | None = None) -> bool:
        """Let the person type until no rank is stopped or ``is_over()`` holds; returns whether they detached.

        first: the rank to begin with. Raises: KeyboardInterrupt.
        """
        stopped_ranks, ranks = self._stopped_ranks, self.procs.ranks
        stopped_ranks.wait_for(lambda: len(stopped_ranks.of(ranks)) == len(ranks), GATHER_S)
        try:
            while not is_over() and (stopped := stopped_ranks.of(ranks)):
                self._tell_of_stops()
                if self.current not in stopped:
                    self._go_to(first if first in stopped else self._next(stopped))
                    first = None
                try:
                    if self._turn():
                        stopped_ranks.left.update(stopped_ranks.of(ranks))
                        return True
                except MeshError as error:
                    self._terminal.say(str(error))
        finally:
            stopped_ranks.stepping.difference_update(ranks)
        return False

    # ---- which rank ---------------------------------------------------------------------------------------------

    def _next(self, stopped: Collection[int]) -> int:
        """The one after the rank that was the current one, round and round."""
        last = -1 if self.current is None else self.current
        return min((rank for rank in stopped if rank > last), default=min(stopped))

    def _go_to(self, rank: int) -> None:
        self.current, self._line_was_pdbs = rank, False
        self._stopped_ranks.left.discard(rank)
        stop = self._stopped_ranks.of([rank]).get(rank)
        if not self._show([rank]) and stop is not None and not stop.at.asks:
            self._terminal.say(f"rank {rank} {stop.words}")

    def _tell_of_stops(self) -> None:
        places: dict[str, list[int]] = {}
        for rank, stop in self._stopped_ranks.of(self.procs.ranks).items():
            if not stop.seen:
                stop.seen = True
                if stop.at.asks:
                    continue  # the question says it all
                places.setdefault(stop.words, []).append(rank)
        if places:
            self._terminal.say("\n".join(f"{name_ranks(ranks)} {words}" for words, ranks in places.items()))

    # ---- a line -------------------------------------------------------------------------------------------------

    def _turn(self) -> bool:
        """Read a line and do as it says; whether it was ``detach``."""
        assert self.current is not None
        rank = self.current
        stop = self._stopped_ranks.of([rank]).get(rank)
        if stop is None:
            return False
        if stop.at.asks:
            self._answer(rank, stop.at)
            return False
        try:
            line = self._terminal.read(f"[{rank}] {stop.at.prompt}", self._watch(rank))
        except EOFError:
            line = "q" if self._post_mortem else "detach"
        if line is None:
            self._terminal.say(f"{self._fate(rank)}; its prompt is closed (press Enter in it where it still stands)")
            return False
        if rank not in self._stopped_ranks.of([rank]):
            unsent = f"; not sent: {line.strip()}" if line.strip() else ""
            if rank in self.procs.lost or unsent:
                self._terminal.say(f"{self._fate(rank)}{unsent}")
            return False
        return self._obey(rank, line if stop.at.prompt.startswith("...") else line.strip())

    def _answer(self, rank: int, question: AtPrompt) -> None:
        """Ask the person a program's question; the answer goes to all ranks that ask the same there."""
        asked = (question.place, question.prompt, question.asks)

        def waiting() -> dict[int, int]:
            stops = self._stopped_ranks.of(self.procs.ranks).items()
            same = {each: stop for each, stop in stops if (stop.at.place, stop.at.prompt, stop.at.asks) == asked}
            for stop in same.values():
                stop.seen = True
            return {each: stop.at.number for each, stop in same.items()}

        again = rank in self._answered
        self._await_stops(self._answered if again else self.procs.ranks, AGAIN_S if again else QUESTION_S)
        prompt = f"[{format_ranks(waiting())}] {question.prompt}"
        try:
            line = self._terminal.read(prompt, lambda: bool(waiting()), hidden=question.asks == ASKS_SECRET)
        except EOFError:
            line = END_OF_INPUT
        if line is None:
            self._terminal.say("the ranks do not ask any more (press Enter where their question still stands)")
            return
        answered = waiting()
        self._answered = frozenset(answered)
        type_line(self.procs, line, answered)
        self._await_answers(answered)

    def _await_stops(self, ranks: Collection[int], limit_s: float) -> None:
        """Give ranks the time to come to a prompt, as long as they run something."""
        deadline = time.monotonic() + limit_s
        while set(ranks).intersection(busy_ranks(self.procs)).difference(self._stopped_ranks.of(ranks)):
            if time.monotonic() >= deadline:
                return
            self._stopped_ranks.wait_for(lambda: len(self._stopped_ranks.of(ranks)) == len(ranks), LOOK_S)

    def _watch(self, rank: int) -> Callable[[], bool]:
        """Whether a line is still wanted: while other ranks are stopped the person gives it, and sees the outcome."""
        told = False

        def is_wanted() -> bool:
            nonlocal told
            stopped = self._stopped_ranks.of(self.procs.ranks)
            if stopped and rank not in stopped and not told:
                told = True
                next_one = self._next(stopped)
                self._terminal.say(f"{self._fate(rank)}; Enter goes to rank {next_one}")
            return bool(stopped)

        return is_wanted

    def _obey(self, rank: int, line: str) -> bool:
        words = line.split()
        if found := re.fullmatch(r"rank\s+(\d+)", line):
            self._switch(int(found[1]))
        elif line == "ranks":
            self._terminal.say(self._describe_ranks())
        elif words[:1] == ["cast"]:
            self._cast(line[len("cast") :].strip())
        elif line == "detach":
            return True
        elif self._post_mortem and _GOES_ON.match(line):
            self.end()
        elif line or self._line_was_pdbs:
            self._line_was_pdbs = True
            if line in ("h", "help"):
                self._terminal.say(_HELP.format(prompt=advice().prompt))
            self._send([rank], line)
        return False

    def _switch(self, rank: int) -> None:
        stopped = self._stopped_ranks.of(self.procs.ranks)
        if rank not in stopped:
            verb = "is" if len(stopped) == 1 else "are"
            raise UsageError(f"rank {rank} is not stopped; {name_ranks(stopped)} {verb}. See them all: ranks")
        self._stopped_ranks.take_text(rank)
        self._go_to(rank)

    def _cast(self, rest: str) -> None:
        words, pairs = rest.split(" "), {}
        known = {*self.procs.base().sizes, *self.procs.sizes, "rank"}
        while words and (found := _TARGET.fullmatch(words[-1])) and found[1] in known:
            pairs[found[1]] = found[2]
            words.pop()
        command = " ".join(words).strip()
        ranks = self._choose(self.procs, pairs).ranks if pairs else self.procs.ranks
        if not command:
            raise UsageError("cast what? For example: cast p x    cast c    cast p loss rank=0,2")
        stopped = self._stopped_ranks.of(ranks)
        if not stopped:
            raise UsageError(f"none of {name_ranks(ranks)} is stopped. See them all: ranks")
        self.cast(command, stopped)

    def cast(self, command: str, ranks: Collection[int] | None = None) -> None:
        """Run a command on all stopped ranks, or on ``ranks``, and show their answers, equal answers once."""
        stopped = self._stopped_ranks.of(self.procs.ranks if ranks is None else ranks)
        for rank in stopped:
            self._stopped_ranks.take_text(rank)  # how it came here is no answer
        self._send(stopped, command)

    def end(self) -> None:
        """End a post-mortem on all ranks."""
        if stopped := self._stopped_ranks.of(self.procs.ranks):
            for rank in stopped:
                self._stopped_ranks.take_text(rank)  # where the others stood, nobody has asked
            self._send(stopped, "q")

    # ---- what ranks do with it ----------------------------------------------------------------------------------

    def _send(self, ranks: Collection[int], line: str) -> None:
        stopped_ranks = self._stopped_ranks
        sent = {rank: stop.at.number for rank, stop in stopped_ranks.of(ranks).items()}
        (stopped_ranks.stepping.difference_update if _GOES_ON.match(line) else stopped_ranks.stepping.update)(sent)
        self._show(sent)  # what was written before belongs before
        type_line(self.procs, line, sent)
        self._await_answers(sent)
        if not _GOES_ON.match(line):
            self._await_steps(sent, line)
        self._show(sent)

    def _await_answers(self, sent: Mapping[int, int]) -> None:
        """Wait until ranks have come to another prompt, or gone. sent: the number of each rank's prompt."""

        def has_answered(rank: int) -> bool:
            gone = rank in self.procs.lost or rank not in self._stopped_ranks.of([rank])
            return gone or self._stopped_ranks.number(rank) > sent[rank]

        while not self._stopped_ranks.wait_for(lambda: all(map(has_answered, sent)), 0.25):
            pass  # an interrupt ends it, and so does the end of the rank

    def _await_steps(self, ranks: Collection[int], line: str) -> None:
        """Give ranks that went on the time to stop again; say where those are that do not."""
        deadline = time.monotonic() + STEP_S
        while True:
            stopped, busy = self._stopped_ranks.of(ranks), set(busy_ranks(self.procs))
            moving = [rank for rank in ranks if rank not in stopped and rank in busy]
            if not moving:
                return
            if time.monotonic() > deadline:
                self._terminal.say(
                    "\n".join(
                        f"{name_ranks(group)} run{'s' if len(group) == 1 else ''} on: {place}"
                        for place, group in group_ranks(where(self.procs.base().select(moving)).items()).items()
                    )
                )
                return
            self._stopped_ranks.wait_for(lambda: len(self._stopped_ranks.of(ranks)) == len(ranks), LOOK_S)

    def _show(self, ranks: Collection[int]) -> bool:
        texts = {rank: text for rank in sorted(ranks) if (text := self._stopped_ranks.take_text(rank))}
        if texts:
            self._terminal.show(texts)
        return bool(texts)

    def _fate(self, rank: int) -> str:
        return f"rank {rank} {'has ended' if rank in self.procs.lost else 'is not at its prompt any more'}"

    def _describe_ranks(self) -> str:
        lines: dict[str, list[int]] = {}
        for one in self.procs.base().status():
            if one.state == "pdb":
                what = f"stopped at {one.where}" + ("    <- this prompt" if one.rank == self.current else "")
            else:
                what = one.where if one.where != one.state and one.state == "busy" else f"{one.state} {one.where}"
                what = one.state if one.where == one.state else what
            lines.setdefault(what, []).append(one.rank)
        labels = {what: f"[{format_ranks(ranks)}]" for what, ranks in lines.items()}
        width = max(map(len, labels.values()))
        return "\n".join(f"  {label:{width}}  {what}" for what, label in labels.items())


def is_notebook() -> bool:
    """Whether this process is the kernel of a notebook, ours or any other of IPython."""
    ipython = sys.modules.get("IPython")
    return ipython is not None and hasattr(ipython.get_ipython(), "kernel")


def tell_person(line: str) -> None:
    """Print a line about the mesh: to stdout in a notebook, where it is part of the cell, to stderr in a script."""
    with contextlib.suppress(OSError, ValueError):  # a terminal that has gone, or a closed file, fails no repair
        print(line, file=sys.stdout if is_notebook() else sys.stderr, flush=True)


class PromptHandler(Protocol):
    """The front end that answers prompts; `meshbook.mesh.driven.set_front_end` names it."""

    def refusal(self) -> str:
        """Return why no person could answer the prompt of a rank that stops in a call made now; empty if one can."""

    def attend(self, procs: ProcMesh, is_over: Callable[[], bool]) -> bool:
        """Let the person type until none of ``procs`` is stopped; runs on the main thread, which waits for a call.

        Returns: whether the person has left ranks stopped. Raises: KeyboardInterrupt.
        """


class ConsoleTerminal:
    """stdin and stdout of a script, as `meshbook.mesh.prompt.Terminal` has them."""

    def show(self, texts: Mapping[int, str]) -> None:
        for rank, text in texts.items():
            self.say("\n".join(f"[{rank}] {line}" for line in text.splitlines()))

    def say(self, text: str) -> None:
        print(text)

    def read(self, prompt: str, is_open: Callable[[], bool], *, hidden: bool = False) -> str | None:
        return getpass.getpass(prompt) if hidden else input(prompt)


class ConsolePromptHandler:
    """The `PromptHandler` of scripts that run in a terminal."""

    def refusal(self) -> str:
        if threading.get_ident() != forks.main_thread:
            return "the call was not made by the main thread, which could ask at the terminal"
        has_terminal = sys.stdin is not None and sys.stdin.isatty()
        return "" if has_terminal else "the program that made the call has no terminal"

    def attend(self, procs: ProcMesh, is_over: Callable[[], bool]) -> bool:
        return DebugPrompt(procs, ConsoleTerminal()).attend(is_over)


def _no_current_mesh() -> ProcMesh:
    raise UsageError("a notebook has a current mesh, this process has none: give the mesh, as in distribute(x, mesh)")


class ProcessFrontEnd:
    """The front end of this process: the terminal, until a notebook extension puts itself in its place (`use`)."""

    def __init__(self) -> None:
        self.use()

    def use(
        self,
        *,
        output_source: OutputSource | None = None,
        prompt_handler: PromptHandler | None = None,
        current: Callable[[], ProcMesh] | None = None,
        of_sizes: Callable[[dict[str, int]], ProcMesh] | None = None,
        show_progress: Callable[[str], object] | None = None,
        note_unhandled: Callable[[MeshFailure], object] | None = None,
    ) -> None:
        """Use these from now on, and the terminal for the rest.

        output_source: called with a ProcMesh on the thread of the caller whose prints have no listener of their own;
        returns an OutputTarget, or None for our stdout. prompt_handler: answers ranks that stop at breakpoints.
        current: returns the mesh that a notebook calls current. of_sizes: returns processes along axes of these sizes.
        show_progress: shows how far a start is, as in ``importing torch, 34 s``; "" takes it away. note_unhandled:
        called with failures that no actor has handled.
        """
        self.output_source = output_source
        self._prompt_handler = prompt_handler or ConsolePromptHandler()
        self.refusal: Callable[[], str] = self._prompt_handler.refusal
        self.current = current or _no_current_mesh
        self.of_sizes = of_sizes
        self.show_progress: Callable[[str], object] = show_progress or _show_on_terminal
        self._note_unhandled = note_unhandled

    def note_unhandled(self, failure: MeshFailure) -> None:
        if self._note_unhandled is not None:
            self._note_unhandled(failure)

    def attend(self, controller: Controller, mesh: MeshState, call: OpenCall) -> None:
        procs = ProcMesh(controller, mesh, call.members)
        if self._prompt_handler.attend(procs, lambda: call.is_told):
            raise LeftStopped(call.what, mesh.stopped_ranks.of(procs.ranks))


def _show_on_terminal(text: str) -> None:
    """Show a line in the place of the one before, where a person sees it; an empty text takes it away."""
    with contextlib.suppress(OSError, ValueError):  # as for `tell_person`
        if sys.stderr.isatty():
            print(f"\r\x1b[K{text}", end="", file=sys.stderr, flush=True)
