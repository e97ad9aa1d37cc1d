"""Questions to ranks and to their agents: plain data both ways, answered while ranks are busy, or in their place.

    any thread ──gather──> put ──Query, urgent──> agents ──> control threads of ranks
               <──answers── `meshbook.calls.table.CallTable` <──Replies── either

A question ends when all who were asked have answered or are lost, at the latest when its time is over.
`HeldDeadlines` tells the ranks of a mesh when one of them stands at a prompt: the others may be waiting for it, so all
of them hold their deadlines. Logs lie on the hosts and belong to the agents there. Stacks are asked of the ranks
themselves, and of their agents where ranks cannot answer.
"""

from __future__ import annotations

import codecs
import contextlib
import functools
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import NamedTuple, Protocol, TypeVar

from meshbook.calls.rank_state import SilenceCause, State, Unresponsive, find_silence
from meshbook.calls.table import CallTable, OpenQuestion
from meshbook.concurrency.future import Future
from meshbook.controller.host_state import HostState
from meshbook.controller.mesh_state import MeshState, stale_view
from meshbook.groups.deadlock import place_of
from meshbook.lifecycle import MeshPhase
from meshbook.shape.members import Members, Region, group
from meshbook.source.location import RUNTIME, USER, Frame, ThreadStack
from meshbook.stacks.mesh_stacks import MeshStacks, RankStack, RankTold
from meshbook.wire import messages as wire
from meshbook.wire.frames import check_sizes

T = TypeVar("T")
STATES_TIMEOUT_S = 0.15  # agents answer at once


def ask_rank(endpoint: str, *args: object) -> wire.AskRank:
    """Return a question to control threads, of plain data. Raises: MessageTooLarge."""
    asked = wire.AskRank(endpoint, wire.encode(args))
    check_sizes([len(asked.args)])
    return asked


def put(
    calls: CallTable,
    question: OpenQuestion[T],
    mesh: MeshState,
    by_host: Mapping[HostState, Sequence[int]],
    asked: wire.AskRank | wire.AskAgent | Callable[[Sequence[int]], wire.AskAgent],
    *,
    in_order: bool = False,
) -> None:
    """Ask the ranks of each host, or its agent about them, under the turn. asked: may be made for the ranks of a host.
    in_order: behind the calls that were sent, not before them."""
    for host, ranks in by_host.items():
        if host.lost or mesh.phase is MeshPhase.STOPPED:
            continue
        each = asked(ranks) if callable(asked) else asked
        if isinstance(each, wire.AskRank):
            question.ranks.update(rank for rank in ranks if rank not in mesh.lost)
        else:
            question.hosts.add(host.id)
        query = wire.Query(question.id, mesh.id, group(ranks), each)
        if in_order:
            host.send(query)
        else:
            host.send_urgent(query)
    calls.ask(question)


class Submit(Protocol):
    def __call__(self, action: Callable[[], object], fail: Callable[[Exception], object] | None = None) -> None: ...


class Questions:
    """The questions that any thread may ask the ranks of a controller's meshes."""

    def __init__(self, submit: Submit, calls: CallTable, next_id: Callable[[], int]) -> None:
        self._submit, self._calls, self._next_id = submit, calls, next_id

    def gather(
        self,
        mesh: MeshState,
        ranks: Iterable[int],
        asked: wire.AskRank | wire.AskAgent | Callable[[Sequence[int]], wire.AskAgent],
        kind: type[T],
        timeout_s: float,
    ) -> dict[int, T]:
        """Ask ``ranks``, or their agents; return the answers by rank, as far as they came in time."""
        done: Future[None] = Future()
        question = OpenQuestion(self._next_id(), mesh.id, kind, timeout_s, lambda _: done.set_result(None))
        ranks = list(ranks)
        self._submit(lambda: put(self._calls, question, mesh, mesh.by_host(ranks), asked), done.set_exception)
        with contextlib.suppress(TimeoutError):  # the table forgets the question by itself
            done.get(timeout_s)
        return question.told

    def first(
        self,
        mesh: MeshState,
        ranks: Sequence[int],
        asked: wire.AskRank,
        kind: type[T],
        *,
        patience_s: float,
        timeout_s: float,
    ) -> tuple[int, T | None] | None:
        """Ask the first of ``ranks``, after ``patience_s`` of silence the next too, and so on; return the first answer.
        Returns: the rank and its answer; None if no rank has answered within ``timeout_s``."""
        answered: Future[tuple[int, T | None]] = Future()
        deadline = time.monotonic() + timeout_s

        def note(question: OpenQuestion[T]) -> None:
            for answer in question.answers.items():
                answered.set_result(answer)

        for number, rank in enumerate(ranks, 1):
            left_s = deadline - time.monotonic()
            question = OpenQuestion(self._next_id(), mesh.id, kind, left_s, note)
            ask = functools.partial(put, self._calls, question, mesh, mesh.by_host([rank]), asked)
            self._submit(ask, answered.set_exception)
            with contextlib.suppress(TimeoutError):
                return answered.get(left_s if number == len(ranks) else min(patience_s, left_s))
        return None

    def tell(self, mesh: MeshState, ranks: Iterable[int], asked: wire.AskRank) -> None:
        """Put a question without waiting for answers."""
        question = OpenQuestion(self._next_id(), mesh.id, object, 0.0)
        self._submit(lambda: put(self._calls, question, mesh, mesh.by_host(ranks), asked))

    def await_printed(
        self, mesh: MeshState, ranks: Iterable[int], on_come: Callable[[], object], timeout_s: float
    ) -> None:
        """Call ``on_come``, under the turn, when all text has come that ``ranks`` have printed by now. Hosts that are
        silent are not waited for, the others at most ``timeout_s``."""
        question = OpenQuestion(self._next_id(), mesh.id, object, timeout_s, lambda _: on_come())

        def ask() -> None:
            by_host = {host: ranks for host, ranks in mesh.by_host(ranks).items() if not host.suspicion}
            put(self._calls, question, mesh, by_host, wire.AskPrinted())

        self._submit(ask)


def look(
    questions: Questions, mesh: MeshState, ranks: Iterable[int], endpoint: str, kind: type[T], timeout_s: float
) -> dict[int, T | Unresponsive]:
    """Return the answers of ``ranks`` to a query, as ``kind``; for ranks that do not answer in time, the reason."""
    ranks = sorted(ranks)
    told = questions.gather(mesh, ranks, ask_rank(endpoint), kind, timeout_s)
    return {**told, **explain_silence(questions, mesh, [rank for rank in ranks if rank not in told])}


def explain_silence(questions: Questions, mesh: MeshState, ranks: Sequence[int]) -> dict[int, Unresponsive]:
    """Return why the control threads of ``ranks`` do not answer."""
    told = questions.gather(mesh, ranks, wire.AskProcesses(), wire.ProcessState, STATES_TIMEOUT_S) if ranks else {}
    states = {rank: told.state for rank, told in told.items()}
    return {rank: find_silence(states.get(rank), mesh.lost.get(rank), mesh.host_of(rank).suspicion) for rank in ranks}


class HeldDeadlines:
    """The stops of ranks at prompts (`StoppedRanks`), passed on to the ranks of their mesh."""

    def __init__(self, calls: CallTable, next_id: Callable[[], int]) -> None:
        self._calls, self._next_id = calls, next_id

    def on_prompted(self, mesh: MeshState, message: wire.Prompted) -> None:
        """Note that a rank has come to a prompt, has written there, or goes on."""
        with self._telling_of_changes(mesh):
            stop = mesh.stopped_ranks.take(message.rank, message.at, message.output)
        if stop is not None:
            self._calls.tell(message.output, stop)

    def merge(self, mesh: MeshState, prompts: Mapping[int, wire.AtPrompt]) -> None:
        """Take in the ranks' answers about their prompts; a former controller may have held deadlines."""
        for rank, at in prompts.items():
            mesh.stopped_ranks.take(rank, at, 0)
        self._tell_all(mesh)

    def on_ended(self, mesh: MeshState, ranks: Iterable[int]) -> None:
        """Note that ranks are at no prompt any more: they have ended, or are told to."""
        with self._telling_of_changes(mesh):
            for rank in ranks:
                mesh.stopped_ranks.lose(rank)

    def on_ready(self, mesh: MeshState) -> None:
        """Tell new ranks, if others stand at prompts."""
        if mesh.stopped_ranks:
            self._tell_all(mesh)

    @contextlib.contextmanager
    def _telling_of_changes(self, mesh: MeshState) -> Iterator[None]:
        """Tell all ranks if the block makes ranks stopped where none was before, or the other way round."""
        before = bool(mesh.stopped_ranks)
        yield
        if bool(mesh.stopped_ranks) != before:
            self._tell_all(mesh)

    def _tell_all(self, mesh: MeshState) -> None:
        question = OpenQuestion(self._next_id(), mesh.id, object, 0.0)
        everyone = mesh.by_host(range(mesh.extent.nelements))
        put(self._calls, question, mesh, everyone, ask_rank("hold_deadlines", bool(mesh.stopped_ranks)))


ANSWER_TIMEOUT_S = 5.0
BURST_BYTES = 128 << 10  # of all logs together, the most that a follower brings at once; then `RATE_BYTES_S`
RATE_BYTES_S = 16 << 10
LEAST_BYTES = 1 << 10  # of each log at each look, however many there are


def read_logs(
    questions: Questions, mesh: MeshState, members: Members, lines: int, containing: str = ""
) -> dict[int, str]:
    """Return the last ``lines`` lines of each member's log that contain a text, as far as the agents answer."""
    return questions.gather(mesh, members.ranks(), wire.ReadLogs(lines, containing), str, ANSWER_TIMEOUT_S)


class LogText(NamedTuple):
    """Text that a rank has added to its log."""

    rank: int
    text: str  # may end in the middle of a line
    skipped_bytes: int  # text before it that is in the log only: more was written than is brought at once


class LogFollower:
    """A reader of logs that remembers how far it has read each of them."""

    def __init__(self, questions: Questions, mesh: MeshState, members: Members, lines: int) -> None:
        """lines: how many lines written before are brought too."""
        self._questions, self._mesh, self._lines = questions, mesh, lines
        self._generation = mesh.generation
        self._offsets = dict.fromkeys(members.ranks(), wire.FROM_THE_END)
        self._decoders = {rank: codecs.getincrementaldecoder("utf-8")("backslashreplace") for rank in self._offsets}
        self._room, self._refilled = float(BURST_BYTES), time.monotonic()

    def look(self) -> list[LogText]:
        """Return the new text, by rank. Waits for the answers of the agents; a silent one is asked again next time.
        Raises: LayoutError if ranks have got other numbers meanwhile, MeshStoppedError."""
        mesh = self._mesh
        mesh.check_usable()
        if mesh.generation != self._generation:
            raise stale_view(mesh)
        now = time.monotonic()
        self._room = min(BURST_BYTES, self._room + (now - self._refilled) * RATE_BYTES_S)
        self._refilled = now
        limit_bytes = max(LEAST_BYTES, int(self._room) // len(self._offsets))
        answers = self._questions.gather(
            mesh,
            self._offsets,
            lambda ranks: wire.ReadOn(tuple((rank, self._offsets[rank]) for rank in ranks), self._lines, limit_bytes),
            wire.LogPiece,
            ANSWER_TIMEOUT_S,
        )
        pieces = [piece for rank, piece in sorted(answers.items()) if rank in self._offsets]
        self._offsets.update((piece.rank, piece.end) for piece in pieces)
        self._room = max(0.0, self._room - sum(len(piece.data) for piece in pieces))
        texts = [
            LogText(piece.rank, self._decoders[piece.rank].decode(piece.data), piece.skipped_bytes) for piece in pieces
        ]
        return [text for text in texts if text.text or text.skipped_bytes]


ANSWER_S = 0.5  # ranks that run Python answer by then
LINES_S = 0.3
HELPERS = 2  # ranks that are asked for the text of lines in another one's stack


class StackQuestion(NamedTuple):
    """The options of `ProcMesh.stacks`."""

    all_threads: bool = False
    native: bool = False
    timeout_s: float = 2.0


def collect_stacks(questions: Questions, mesh: MeshState, members: Members, ask: StackQuestion) -> MeshStacks:
    """Return the stacks of ``members``. All ranks are asked how far they are, for the sake of the verdict."""
    everyone = Region.of(mesh.extent)
    wanted = [rank for rank in members.ranks() if rank not in mesh.lost]
    answers = questions.gather(mesh, everyone.ranks(), ask_rank("stacks", ask.all_threads), RankTold, ANSWER_S)
    silent = [rank for rank in everyone.ranks() if rank not in answers and rank not in mesh.lost]
    reasons = explain_silence(questions, mesh, silent)
    outside = wire.AskStacks(ask.native, ask.timeout_s)
    unread = wanted if ask.native else silent
    dumps = questions.gather(mesh, unread, outside, wire.RankDump, ask.timeout_s + STATES_TIMEOUT_S) if unread else {}
    threads = _with_lines(questions, mesh, list(answers), dumps, ask.all_threads)
    found = {
        rank: _told(rank, answers[rank], threads.get(rank), dumps.get(rank))
        if rank in answers
        else _silent(rank, mesh, reasons, threads.get(rank, ()), dumps.get(rank))
        for rank in everyone.ranks()
    }
    chosen = list(members.ranks())
    return MeshStacks([found.pop(rank) for rank in chosen], list(found.values()))


def _told(rank: int, told: RankTold, read: Sequence[ThreadStack] | None, dump: wire.RankDump | None) -> RankStack:
    """Return the stack of a rank that answers. read: its stack with native frames, if its agent read it."""
    waiting = told.collectives.waiting
    state: State = "idle"
    doing, since_s = "idle", 0.0
    if told.paused:
        state, doing, since_s = "pdb", told.paused, told.busy_s
    elif waiting:
        state, doing, since_s = "waiting", place_of(waiting[0]), waiting[0].since_s
    elif told.busy_s:
        state, doing, since_s = "busy", told.where, told.busy_s
    threads = tuple(read) if read and state != "idle" else told.threads
    problem = dump.problem if dump is not None and state != "idle" else ""
    read_by = dump.read_by if read and dump is not None and state != "idle" else ""
    return RankStack(rank, state, doing, since_s, threads, told.collectives, read_by, problem)


def _silent(
    rank: int,
    mesh: MeshState,
    reasons: Mapping[int, Unresponsive],
    threads: Sequence[ThreadStack],
    dump: wire.RankDump | None,
) -> RankStack:
    if (lost := mesh.lost.get(rank)) is not None:
        return RankStack(rank, "dead", f"ended: {lost.cause}", 0.0, ())
    reason = reasons.get(rank, Unresponsive(SilenceCause.HOST_SILENT))
    read_by, problem = (dump.read_by, dump.problem) if dump is not None else ("", "")
    return RankStack(rank, reason.state, str(reason), 0.0, tuple(threads), None, read_by, problem)


def _with_lines(
    questions: Questions, mesh: MeshState, helpers: Sequence[int], dumps: Mapping[int, wire.RankDump], all_threads: bool
) -> dict[int, list[ThreadStack]]:
    """Return the threads that agents have read, with the texts of lines as other ranks know them."""
    threads = {
        rank: [thread for thread in dump.threads if thread.is_main or (all_threads and _is_users(thread))]
        for rank, dump in dumps.items()
        if dump.threads
    }
    known = _ask_lines(questions, mesh, helpers, [thread for each in threads.values() for thread in each])

    def with_line(frame: Frame) -> Frame:
        line = known.get((frame.file, frame.line))
        return line._replace(function=frame.function) if line is not None else frame

    return {
        rank: [one._replace(frames=tuple(with_line(frame) for frame in one.frames)) for one in each]
        for rank, each in threads.items()
    }


def _is_users(thread: ThreadStack) -> bool:
    kinds = {frame.kind for frame in thread.frames}
    return USER in kinds or (RUNTIME not in kinds and not thread.name.startswith("meshbook."))


def _ask_lines(
    questions: Questions, mesh: MeshState, helpers: Sequence[int], threads: Iterable[ThreadStack]
) -> dict[tuple[str, int], Frame]:
    """Return the frames that ranks know, by (file, line); cells have the same names on all ranks that ran them."""
    wanted = sorted({(frame.file, frame.line) for thread in threads for frame in thread.users})
    lines: dict[tuple[str, int], Frame] = {}
    if not wanted or not helpers:
        return lines
    asked = ask_rank("source_lines", wanted)
    for known in questions.gather(mesh, sorted(helpers)[:HELPERS], asked, list[Frame], LINES_S).values():
        lines.update({place: frame for place, frame in zip(wanted, known, strict=False) if frame.source})
    return lines
