"""Cells as plain Python: IPython's own syntax becomes calls of the standard library, or is refused with its line.

IPython reads the cell first, so that each ``%cd x``, ``!ls`` or ``x?`` is a call of ``get_ipython()``, with lines and
columns. Each of these calls is then written as a person would write it in a script.
"""

from __future__ import annotations

import ast
import io
import re
import string
import symtable
import tokenize
from collections.abc import Iterable, Iterator
from typing import NamedTuple

from meshbook_extension.cells.transformers import as_ranks_do

SHOW = "show_value"
"""The script's function that prints the value of a cell's last expression."""
QUIET = frozenset({"autoreload", "config", "load_ext", "matplotlib", "precision", "reload_ext", "xmode"})
"""Magics that change how a notebook shows things, which a script does not need."""
_INSTEAD = {
    "input": "nobody answers a script: write the value into the cell, or read it from sys.argv",
    "getpass": "nobody answers a script: read it from os.environ",
    "breakpoint": "nobody is at the prompt of a script: take it out",
    "set_trace": "nobody is at the prompt of a script: take it out",
    "get_ipython": "a script has no IPython: write it in Python",
    "exit": "it would end the notebook: take it out",
    "quit": "it would end the notebook: take it out",
    "_mesh": "a script has no results of cells: bind the value to a name on the ranks, and pull that",
    "Out": "a script has no results of cells: bind the value to a name",
    "In": "a script has no inputs: take it out",
    "_": "a script has no results of cells: bind the value to a name",
}


class Problem(NamedTuple):
    """A line that cannot be exported. instead: the way to do it otherwise."""

    number: int
    line: int
    text: str
    instead: str

    def __str__(self) -> str:
        return f"In [{self.number}], line {self.line}: {self.text}: {self.instead}"


class NotPlain(Exception):
    """A part of a cell that has no form in Python. Arguments: its text, the way to do it otherwise, and its line."""


class Names(NamedTuple):
    """The names that code binds at its top level, and the global names that it uses, in functions too."""

    bound: frozenset[str]
    used: frozenset[str]


def names_of(python: str) -> Names:
    """Return the names of plain Python, with a top-level await too."""
    awaits = "await" in python or "async" in python
    text = f"async def cell():\n{indented(python)}\n    pass\n" if awaits and has_await(python) else python
    table = symtable.symtable(text, "<cell>", "exec")
    top = table.get_children()[0] if text is not python else table
    symbols = top.get_symbols()
    bound = {each.get_name() for each in symbols if each.is_assigned() or each.is_imported()}
    used = {each.get_name() for each in symbols if each.is_referenced()}
    for inner in _all_inside(top):
        for each in inner.get_symbols():
            if each.is_global() and (each.is_referenced() or each.is_assigned()):
                used.add(each.get_name())
                bound.update({each.get_name()} if each.is_declared_global() and each.is_assigned() else ())
            elif each.is_free() and text is not python:
                used.add(each.get_name())
    return Names(frozenset(bound), frozenset(used))


def _all_inside(table: symtable.SymbolTable) -> Iterator[symtable.SymbolTable]:
    for child in table.get_children():
        yield child
        yield from _all_inside(child)


def has_await(python: str) -> bool:
    """Whether code awaits at its top level, so that it has to run in an event loop."""
    pending: list[ast.AST] = list(ast.parse(python).body)
    while pending:
        node = pending.pop()
        if isinstance(node, ast.Await | ast.AsyncFor | ast.AsyncWith):
            return True
        if isinstance(node, ast.comprehension) and node.is_async:
            return True
        if not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda):
            pending += ast.iter_child_nodes(node)
    return False


def indented(python: str, by: str = "    ") -> str:
    """Return code one level deeper; the lines inside of texts stay as they are."""
    inside: set[int] = set()
    begun: list[int] = []
    for token in tokenize.generate_tokens(io.StringIO(python).readline):
        name = tokenize.tok_name[token.type]
        if name == "STRING":
            inside.update(range(token.start[0] + 1, token.end[0] + 1))
        elif name in ("FSTRING_START", "TSTRING_START"):
            begun.append(token.start[0])
        elif name in ("FSTRING_END", "TSTRING_END"):
            inside.update(range(begun.pop() + 1, token.end[0] + 1))
    lines = lines_of(python)
    return "".join(line if at in inside or not line.strip() else by + line for at, line in enumerate(lines, 1))


def lines_of(python: str) -> list[str]:
    """Return lines as Python counts them, with their ends; texts may have what ends a line elsewhere."""
    return re.findall(r"[^\n]*\n|[^\n]+", python)


class Edits:
    """Replacements in a text, by the places of its syntax tree."""

    def __init__(self, text: str) -> None:
        self._lines = lines_of(text)
        self._starts = [0]
        for line in self._lines:
            self._starts.append(self._starts[-1] + len(line.encode()))
        self._bytes = text.encode()
        self._edits: list[tuple[int, int, str]] = []

    def replace(self, node: ast.AST, by: str) -> None:
        """Put ``by`` in the place of an expression or a statement."""
        low = self._starts[node.lineno - 1] + node.col_offset  # type: ignore[attr-defined]
        high = self._starts[node.end_lineno - 1] + node.end_col_offset  # type: ignore[attr-defined]
        self._edits.append((low, high, by))

    def remove_line(self, node: ast.AST) -> None:
        """Take the lines of an expression away, a decorator's with its ``@``."""
        at, end = node.lineno, node.end_lineno  # type: ignore[attr-defined]
        self._edits.append((self._starts[at - 1], self._starts[end], ""))

    def indentation(self, node: ast.AST) -> str:
        """Return the blanks before the line of a statement."""
        line = self._lines[node.lineno - 1]  # type: ignore[attr-defined]
        return line[: len(line) - len(line.lstrip())]

    def text_of(self, node: ast.AST) -> str:
        """Return the text of an expression or a statement."""
        low = self._starts[node.lineno - 1] + node.col_offset  # type: ignore[attr-defined]
        high = self._starts[node.end_lineno - 1] + node.end_col_offset  # type: ignore[attr-defined]
        return self._bytes[low:high].decode()

    def result(self) -> str:
        """Return the text with all replacements."""
        done, begun = self._bytes, len(self._bytes) + 1
        for low, high, by in sorted(self._edits, key=lambda each: (-each[1], each[0])):
            if high <= begun:  # else it is inside of one that was replaced
                done, begun = done[:low] + by.encode() + done[high:], low
        return done.decode()


class PlainCell:
    """A cell, or a part of one, in plain Python."""

    def __init__(self, code: str, number: int, lines_above: int, known: Iterable[str] = ()) -> None:
        """number, lines_above: the place of ``code``, for problems. known: the notebook's names, for ``$x``."""
        self.number = number
        self.packages: list[str] = []
        """The packages that the cell installs."""
        self.problems: list[Problem] = []
        self._above, self._known = lines_above, frozenset(known)
        leading = len(code) - len(code.lstrip("\n"))
        self._above += leading
        self._line = 1
        python = as_ranks_do(code)
        self.text = self._translate(python).rstrip() + "\n"

    def refuse(self, line: int, text: str, instead: str) -> None:
        """Note a line of the code that cannot be exported."""
        self.problems.append(Problem(self.number, line + self._above, text, instead))

    def _translate(self, python: str) -> str:
        tree, edits = ast.parse(python), Edits(python)
        for node in ast.walk(tree):
            statement = node.value if isinstance(node, ast.Expr | ast.Assign) else None
            if (call := ipython_call(statement)) is not None:
                self._replace(edits, node, call, is_alone=isinstance(node, ast.Expr))
        calls = [call for node in ast.walk(tree) if (call := ipython_call(getattr(node, "value", None)))]
        ours = {id(call.func.value.func) for call in calls}  # type: ignore[attr-defined]
        bound = _all_bound(tree)
        for node in ast.walk(tree):
            if isinstance(node, ast.Name) and node.id not in bound and id(node) not in ours:
                if instead := _INSTEAD.get(node.id) or _INSTEAD["_"] * bool(_RESULT.fullmatch(node.id)):
                    self.refuse(node.lineno, node.id + "()" * (node.id in _CALLED), instead)
            elif isinstance(node, ast.Attribute) and node.attr == "set_trace":
                self.refuse(node.lineno, f"{ast.unparse(node)}()", _INSTEAD["set_trace"])
        return edits.result()

    def _replace(self, edits: Edits, node: ast.AST, call: ast.Call, *, is_alone: bool) -> None:
        kind = call.func.attr  # type: ignore[attr-defined]
        self._line = call.lineno
        words = [each.value if isinstance(each, ast.Constant) else "" for each in call.args]
        try:
            lines = self._write(kind, [str(word) for word in words], is_alone=is_alone)
        except NotPlain as error:
            self.refuse(call.lineno, *error.args)
            return
        if is_alone:
            blanks = edits.indentation(node)
            edits.replace(node, f"\n{blanks}".join(lines or ["pass"] * bool(blanks)))
        else:
            edits.replace(call, lines[-1])

    def _write(self, kind: str, words: list[str], *, is_alone: bool) -> list[str]:
        """Return the lines of Python for a call of IPython; its value is that of the last one. Raises: NotPlain."""
        match kind, words:
            case "system", [command]:
                return [f"subprocess.run({self._filled(command)}, shell=True)"]
            case "getoutput", [command]:
                run = f"subprocess.run({self._filled(command)}, shell=True, capture_output=True, text=True)"
                return [f"{run}.stdout.splitlines()"]
            case "run_line_magic", [("cd" | "chdir"), rest]:
                folder = self._filled(rest.removeprefix("-q").strip() or "~")
                shown = [] if rest.startswith("-q") or not is_alone else ["print(os.getcwd())"]
                return [f"os.chdir(os.path.expanduser({folder}))", *shown]
            case "run_line_magic", ["pwd", _]:
                return [f"{SHOW}(os.getcwd())" if is_alone else "os.getcwd()"]
            case "run_line_magic", [("env" | "set_env"), rest] if rest.strip():
                name, equals, value = re.match(r"(\w+)\s*(=|\s|$)\s*(.*)", rest.strip(), re.DOTALL).groups()  # type: ignore[union-attr]
                if not (equals.strip() or value):
                    return [f"{SHOW}(os.environ[{name!r}])" if is_alone else f"os.environ[{name!r}]"]
                value = self._filled(value)
                return [f"os.environ[{name!r}] = {value}", f'print("env: {name}=" + os.environ[{name!r}])']
            case "run_line_magic", ["time", statement]:
                timed = PlainCell(statement, self.number, self._above + self._line - 1, self._known)
                self.problems += timed.problems
                return timed.text.rstrip("\n").split("\n")
            case "run_line_magic", ["timeit", rest]:
                number = ((found := re.match(r"-n\s*(\d+)\s+", rest)) and found[1]) or "100"
                repeated = re.sub(r"^(-[nrtcpqo]\s*\d*\s+)*", "", rest)
                seconds = f"timeit.timeit({repeated!r}, globals=globals(), number={number}) / {number}"
                return [f'print(f"{{{seconds}:.3g}} s per loop")'] if is_alone else [seconds]
            case "run_line_magic", [("pinfo" | "pinfo2"), name]:
                return [f"help({name})"]
            case "run_line_magic", [("pip" | "conda"), rest]:
                self.packages += [word for word in rest.split()[1:] if not word.startswith("-")]
                return []
            case "run_line_magic", [name, _] if name in QUIET:
                return []
            case "run_cell_magic", [("time" | "prun" | "mute_output"), _, body]:
                return self._translate(as_ranks_do(body)).rstrip("\n").split("\n")
            case "run_cell_magic", [("bash" | "sh"), "", body]:
                return [f'subprocess.run(["{words[0]}", "-c", {_quoted(body)}])']
            case "run_cell_magic", ["writefile", name, body] if not name.startswith("-"):
                return [f"Path({name.strip()!r}).write_text({_quoted(body)})", f'print("Writing {name.strip()}")']
            case "run_line_magic", [name, _]:
                raise NotPlain(f"%{name}", "it has no form in Python: write it otherwise, or leave the cell out")
            case "run_cell_magic", [name, *_]:
                raise NotPlain(f"%%{name}", "it has no form in Python: write it otherwise, or leave the cell out")
        raise NotPlain(f"get_ipython().{kind}", _INSTEAD["get_ipython"])

    def _filled(self, text: str) -> str:
        """Return the Python text for a line in which IPython fills in ``{x}`` and ``$x``. Raises: NotPlain."""
        if "{" not in text and "$" not in text:
            return repr(text)
        marked = re.sub(r"(?<!\$)\$([^\W\d]\w*)", lambda at: f"{{{at[1]}}}" if at[1] in self._known else at[0], text)
        try:
            fields = [field for _, field, _, _ in string.Formatter().parse(marked) if field is not None]
            for field in fields:
                ast.parse(field, mode="eval")
        except (ValueError, SyntaxError):
            return repr(text)  # as IPython leaves it
        if any(set("\"'\\") & set(field) for field in fields):
            raise NotPlain(text, "bind the value to a name, and use that in the braces")
        return ("f" if fields else "") + repr(marked.replace("$$", "$"))


def ipython_call(node: object) -> ast.Call | None:
    """Return the call that IPython makes of its own syntax, if ``node`` is one."""
    match node:
        case ast.Call(func=ast.Attribute(value=ast.Call(func=ast.Name(id="get_ipython")))):
            return node
    return None


_CALLED = frozenset({"input", "getpass", "breakpoint", "exit", "quit"})


_RESULT = re.compile(r"_{2,3}|_i*\d+|_i+")
"""The names of IPython's earlier results and inputs."""


def _all_bound(tree: ast.AST) -> set[str]:
    found: set[str] = set()
    for node in ast.walk(tree):
        match node:
            case ast.Name(id=name, ctx=ast.Store()) | ast.arg(arg=name) | ast.FunctionDef(name=name):
                found.add(name)
            case ast.alias(name=name, asname=other):
                found.add(other or name)
    return found


def _quoted(text: str) -> str:
    plain = not re.search(r'\\|"""|"$', text)
    return f'"""{text}"""' if plain and "\n" in text else repr(text)


def with_last_value(python: str, show: str = SHOW) -> str:
    """Return code that prints its last expression, as a notebook shows it; one that ends in ``;`` is not shown.

    show: the script's function that prints it.
    """
    tree = ast.parse(python)
    if not tree.body or not isinstance(last := tree.body[-1], ast.Expr) or is_silent(python):
        return python
    edits = Edits(python)
    match last.value:
        case ast.Call(func=ast.Name(id=("print" | "print_once" | "display" | "help"))):
            return python
        case ast.Call(func=ast.Attribute(value=ast.Name(id=("subprocess" | "os")))):
            return python
    edits.replace(last, f"{show}({edits.text_of(last).strip()})")
    return edits.result()


def is_silent(python: str) -> bool:
    """Whether code ends in a semicolon, by which a notebook shows no value."""
    kinds = (tokenize.COMMENT, tokenize.NEWLINE, tokenize.NL, tokenize.ENDMARKER)
    tokens = [each for each in tokenize.generate_tokens(io.StringIO(python).readline) if each.type not in kinds]
    return bool(tokens) and tokens[-1].string == ";"
