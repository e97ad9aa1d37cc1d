"""The outputs of a notebook without the machine and the moment that they were computed on, so that git can keep them.

Two runs of one notebook differ in pids, ports, paths, names of hosts and users, addresses in memory, times. `normalise`
puts stand-ins in their places that still read well: the first pid is 1001 in each run, a path keeps its end, a time
keeps its first digit. Widgets keep what a viewer without a kernel can show.

Two tags of a cell's metadata say what cannot be normalised:

    varies      what the cell says depends on the run: measured times, random numbers
    any-order   its outputs come by several roads, now one first, now another; streams are put first
"""

from __future__ import annotations

import base64
import contextlib
import getpass
import re
import socket
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import nbformat

VARIES, ANY_ORDER = "varies", "any-order"
STATIC = ("text/plain", "text/html", "text/markdown", "text/latex", "image/png", "image/jpeg", "image/svg+xml")
"""The kinds of data that a viewer shows without a kernel."""
PICTURES = ("image/png", "image/jpeg", "image/svg+xml")
LATE_NOTES = ("look: %mesh stacks", "mesh tensors wait for this: ", "go on when it answers")
"""What a cell gets to say on stderr about ranks that wait, on a slow machine, or because it was planted."""
FIRST_PID, FIRST_PORT = 1001, 50001
HOST, USER = "localhost", "user"

_COLOUR = re.compile(r"(\x1b\[[0-9;]*m)")
_PATH = re.compile(r"(?<![\w.:/<~…*])~?(?:/[\w.+@%-]+){2,}/?")
_LIBRARY = re.compile(r".*/(?:site-packages|dist-packages|python3\.\d+)/")
_PID = re.compile(r"\b(pid|process)([ =:]+)(\d+)\b")
_PORT = re.compile(r"(\bport[ =:]+|\blocalhost:|\b\d+\.\d+\.\d+\.\d+:|tcp://[\w.-]+:)(\d{2,5})\b")
_FOREIGN_IP = re.compile(r"(?<![\d.])(?!127\.|0\.0\.0\.0|192\.0\.2\.)\d{1,3}(?:\.\d{1,3}){3}(?![\d.])")
_ADDRESS = re.compile(r"\b0x[0-9a-f]{6,}")
_DATE = re.compile(r"\b20\d\d-[01]\d-[0-3]\d\b")
_CLOCK = re.compile(r"\b[0-2]\d:[0-5]\d:[0-5]\d(?:\.\d+)?")
_MEASURED = re.compile(r"(?P<left>(?<=  ) *)?\b(?P<number>\d+\.\d+) (?P<unit>s|ms|µs)\b(?P<right>  +)?")
_MINUTES = re.compile(r"\b(\d+ min) \d+ s\b")
_MEMORY = re.compile(r"\b(\d+(?:\.\d+)?) ([kMGT]B)\b")
_HTML_MEMORY = re.compile(r"(?<=>)\d+(?:\.\d+)? [kMGT]B(?=</td>)")
_ANY_TIME = re.compile(r"\b\d+(?:\.\d+)? (?:s|ms|µs|min)\b")
_LABEL = re.compile(r"\[(\d+(?:-\d+)?(?:,\d+(?:-\d+)?)*)\] (.*)")


class Machine(NamedTuple):
    """The names by which a machine would be known."""

    hosts: tuple[str, ...]
    users: tuple[str, ...]

    @classmethod
    def here(cls) -> Machine:
        """Return the names of this machine and of its user."""
        host, user = socket.gethostname(), ""
        with contextlib.suppress(OSError, KeyError):  # a uid without a name, as in some containers
            user = getpass.getuser()
        return cls(hosts=(host, host.partition(".")[0]), users=(user,))

    def replacements(self, sources: str) -> dict[str, str]:
        """Return the stand-in of each name; a name that is a word of the notebook itself tells nothing, and stays."""
        known = {"", "root", HOST, USER, *re.findall(r"[\w.-]+", sources)}
        found = [*((name, HOST) for name in self.hosts), *((name, USER) for name in self.users)]
        return {name: other for name, other in found if name not in known}


def normalise(notebook: Any, machine: Machine) -> None:
    """Put stand-ins into the outputs of an executed notebook, in place, and drop what only a kernel could show.

    What was normalised before stays as it is.
    """
    words = _Words(machine.replacements("\n".join(cell.source for cell in notebook.cells)))
    notebook.metadata.pop("widgets", None)
    notebook.metadata.language_info = nbformat.from_dict({"name": "python"})
    for cell in notebook.cells:
        if cell.cell_type == "code":
            cell.metadata.pop("execution", None)
            cell.outputs = _in_order(cell, [output for output in cell.outputs if _is_kept(cell, output)])
            for output in cell.outputs:
                _rewrite(output, words.normal)


def kinds_of(cell: Any) -> list[str]:
    """Return what a code cell's outputs are, in order: ``stream stdout``, ``display_data image/png text/plain``, ..."""
    return [
        " ".join([output.output_type, *([output.name] if "name" in output else sorted(output.get("data", ())))])
        for output in cell.get("outputs", ())
    ]


def says_the_same(one: Any, other: Any) -> bool:
    """Whether two normalised notebooks differ in nothing but times, and in what cells say that vary."""
    return one.metadata == other.metadata and [*map(_essence, one.cells)] == [*map(_essence, other.cells)]


def bytes_of_pictures(cell: Any) -> list[int]:
    """Return the size of each picture among a cell's outputs, as a file."""
    return [
        len(data.encode()) if mime == "image/svg+xml" else len(base64.b64decode(data))
        for output in cell.get("outputs", ())
        for mime, data in output.get("data", {}).items()
        if mime in PICTURES
    ]


# ---- which outputs --------------------------------------------------------------------------------------------------


def _is_kept(cell: Any, output: Any) -> bool:
    """Take from the output what only a kernel can show; False where nothing is left, as of a bar that has gone.

    A note about ranks that wait is kept in cells that are meant to fail; elsewhere it tells that the machine was slow.
    """
    if "data" in output:
        output.data = nbformat.from_dict({mime: data for mime, data in output.data.items() if mime in STATIC})
        return any(output.data.values())
    is_note = output.get("name") == "stderr" and any(words in output.text for words in LATE_NOTES)
    return not is_note or "raises-exception" in cell.metadata.get("tags", ())


def _in_order(cell: Any, outputs: Sequence[Any]) -> list[Any]:
    """Join what one stream got piece by piece: how many pieces there are depends on the moment."""
    if ANY_ORDER in cell.metadata.get("tags", ()):
        rank = {"stderr": 0, "stdout": 1}
        outputs = sorted(outputs, key=lambda output: rank.get(output.get("name", ""), 2))
    joined: list[Any] = []
    for output in outputs:
        if joined and output.output_type == joined[-1].output_type == "stream" and output.name == joined[-1].name:
            joined[-1].text += output.text
        else:
            joined.append(output)
    return joined


def _rewrite(output: Any, normal: Callable[[str], str]) -> None:
    match output.output_type:
        case "stream":
            output.text = normal(output.text)
        case "error":
            output.evalue = normal(output.evalue)
            output.traceback = [normal(text) for text in output.traceback]
        case _:
            output.data.update({mime: normal(data) for mime, data in output.data.items() if mime.startswith("text/")})


# ---- texts ----------------------------------------------------------------------------------------------------------


class _Words:
    """The stand-ins of one notebook; each pid has its own, from its first place to its last."""

    def __init__(self, names: Mapping[str, str]) -> None:
        self._names = {re.compile(rf"(?<![\w.-]){re.escape(name)}(?![\w-])"): other for name, other in names.items()}
        self._numbers: dict[tuple[str, str], int] = {}

    def normal(self, text: str) -> str:
        """Return ``text`` with stand-ins."""
        text = self._tables(text)
        return "".join(part if _COLOUR.match(part) else self._plain(part) for part in _COLOUR.split(text))

    def _plain(self, text: str) -> str:
        """Paths before names: a path may contain some. Ports before addresses, whose dots would be gone else."""
        text = _PATH.sub(_end_of_path, text)
        for name, other in self._names.items():
            text = name.sub(other, text)
        text = _PID.sub(lambda found: f"{found[1]}{found[2]}{self._pid(found[3])}", text)
        text = _PORT.sub(lambda found: f"{found[1]}{self._number('port', found[2], FIRST_PORT)}", text)
        text = _FOREIGN_IP.sub(lambda found: f"192.0.2.{self._number('ip', found[0], 1)}", text)
        text = _ADDRESS.sub("0x…", text)
        text = _CLOCK.sub("hh:mm:ss", _DATE.sub("yyyy-mm-dd", text))
        return _HTML_MEMORY.sub(_round_memory, _MINUTES.sub(r"\1", _MEASURED.sub(_round_time, text)))

    def _pid(self, pid: str) -> str:
        return str(self._number("pid", pid, FIRST_PID))

    def _number(self, what: str, found: str, first: int) -> int:
        count = sum(kind == what for kind, _ in self._numbers)
        return self._numbers.setdefault((what, found), first + count)

    def _tables(self, text: str) -> str:
        """Lay out anew the tables of ranks (`%mesh`), whose columns of hosts, pids and memory change their widths."""
        lines, done = text.split("\n"), 0
        for index, line in enumerate(lines):
            heads = [*re.finditer(r"\S+(?: \S+)*", line)]
            if index < done or not {"host", "state"} <= {head[0] for head in heads}:
                continue
            done = index + 1
            while done < len(lines) and lines[done].strip():
                done += 1
            starts = [head.start() for head in heads]
            ends = [*starts[1:], None]
            rows = [
                [row[start:end].strip() for start, end in zip(starts, ends, strict=True)] for row in lines[index:done]
            ]
            rows[1:] = [
                [self._in_table(head, text) for head, text in zip(rows[0], row, strict=True)] for row in rows[1:]
            ]
            widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
            lines[index:done] = [
                "  ".join(text.ljust(width) for text, width in zip(row, widths, strict=True)).rstrip() for row in rows
            ]
        return "\n".join(lines)

    def _in_table(self, head: str, text: str) -> str:
        match head:
            case "pid" if text.isdecimal():
                return self._pid(text)
            case "memory":
                return _MEMORY.sub(_round_memory, text)
            case _:
                return self._plain(text)


def _end_of_path(found: re.Match[str]) -> str:
    path = found[0].rstrip("/")
    inside = _LIBRARY.sub("", path)
    return f"…/{inside if inside != path else path.rpartition('/')[2]}"


def _first_digit(number: str) -> str:
    """``12.2`` as 10, ``0.057`` as 0.06."""
    return f"{float(f'{float(number):.0e}'):g}"


def _round_time(found: re.Match[str]) -> str:
    """A time with its first digit; in a column, which has two blanks at a side, it keeps its width."""
    text = f"{_first_digit(found['number'])} {found['unit']}"
    before = f"{found['number']} {found['unit']}"
    left, right = found["left"], found["right"]
    if left is not None:
        return left + text.rjust(len(before)) + (right or "")
    return text + (right or "") if right is None else text.ljust(len(before)) + right


def _round_memory(found: re.Match[str]) -> str:
    number, unit = found[0].split(" ")
    return f"{_first_digit(number)} {unit}"


# ---- what does not depend on the moment -----------------------------------------------------------------------------


def _essence(cell: Any) -> object:
    """What a cell is and says, but for times, pids, and which ranks' lines came first."""
    head = (cell.cell_type, cell.id, cell.source, cell.metadata)
    if cell.cell_type != "code":
        return head
    if VARIES in cell.metadata.get("tags", ()):
        return (*head, cell.execution_count, kinds_of(cell))
    return (*head, cell.execution_count, [_said(output) for output in cell.outputs])


def _said(output: Any) -> object:
    match output.output_type:
        case "stream":
            return (
                output.name,
                sorted(line for text in output.text.splitlines() for line in _by_rank(_timeless(text))),
            )
        case "error":
            return (output.ename, _timeless(output.evalue), [_timeless(text) for text in output.traceback])
        case kind:
            return (kind, {mime: _timeless(data) for mime, data in output.data.items()})


def _timeless(text: str) -> str:
    return _PID.sub(r"\1 #", _ANY_TIME.sub("# s", text))


def _by_rank(line: str) -> list[str]:
    """A line for each rank that said it; how many ranks share a line depends on the moment."""
    if (found := _LABEL.fullmatch(line)) is None:
        return [line]
    ends = [part.partition("-")[::2] for part in found[1].split(",")]
    return [f"[{rank}] {found[2]}" for low, high in ends for rank in range(int(low), int(high or low) + 1)]
