"""IPython's completer and inspector over a rank's living names, on a side thread while the main thread computes.

Nothing is guessed (jedi is off: the objects are there, and it takes seconds with torch) and nothing of the user's runs
beyond what looking at an object means: ``__dir__``, attributes without properties. Each question gets a completer of
its own, over a copy of the namespace, since the main thread goes on.

An object in words has the form of IPython's ``name?``, at a cost that does not grow with the object. IPython's own
inspector writes ``str(obj)`` first and cuts it then. A list of ten million numbers holds the GIL for a second that way,
and with it the rank; a tensor on a GPU waits for whatever runs there.
"""

# mypy: disable-error-code="no-untyped-call"

from __future__ import annotations

import builtins
import inspect
import keyword
import os
import reprlib
import sys
import warnings
from collections.abc import Iterable, Sequence, Sized
from itertools import islice
from types import BuiltinFunctionType, FunctionType, MethodType, ModuleType
from typing import TYPE_CHECKING, Any, NamedTuple

from IPython.core import completer as ipython_completer
from IPython.core import oinspect
from IPython.core.completer import IPCompleter, ProvisionalCompleterWarning, has_open_quotes
from IPython.utils.tokenutil import token_at_cursor

from meshbook.concurrency.patches import patch
from meshbook.shell.attributes import attribute_names, listed
from meshbook.shell.imports import import_names

if TYPE_CHECKING:
    from IPython.core.completer import Completion
    from IPython.core.interactiveshell import InteractiveShell

MATCHES_MAX = 2000
"""Front ends filter what they have got as one types on, so that ``torch.`` had better bring all of its names."""

TEXT_MAX_CHARS = 500
"""A completion that is longer (a key of a dict, say) is left out."""


class Match(NamedTuple):
    """One completion, as ``_jupyter_types_experimental`` has it; ``text`` stands for all from start to end."""

    text: str
    type: str
    signature: str = ""


class Matches(NamedTuple):
    """What may stand in place of ``code[start:end]``."""

    start: int
    end: int
    items: list[Match]


class _LiveCompleter(IPCompleter):
    """Looks at objects, guesses nothing."""

    def __init__(self, shell: InteractiveShell, namespace: dict[str, object]) -> None:
        super().__init__(shell=shell, namespace=namespace, global_namespace={})
        self.use_jedi = False
        if self.has_trait("evaluation"):  # from IPython 8.6
            self.evaluation = "limited"
        self.custom_completers = shell.Completer.custom_completers

    def fwd_unicode_match(self, text: str) -> tuple[str, Sequence[str]]:
        """``\\alp``: the shell's own completer keeps the names of all characters, which take a second to list."""
        return self.shell.Completer.fwd_unicode_match(text) if "\\" in text else ("", ())

    @staticmethod
    def _get_keys(obj: object) -> list[object]:
        if isinstance(obj, dict):
            return list(islice(obj, MATCHES_MAX))
        return list(IPCompleter._get_keys(obj))[:MATCHES_MAX]


def prepare() -> None:
    """Once per process: make IPython's completer fit for ranks."""
    expect_provisional()
    patch(ipython_completer, "MATCHES_LIMIT", MATCHES_MAX)
    patch(ipython_completer, "dir2", lambda thing: sorted({name for name in listed(thing) if isinstance(name, str)}))
    _trust_modules_of_torch()


def expect_provisional() -> None:
    """IPython's completer warns that it may change, or raises that. Its way around that is for one thread only."""
    warnings.filterwarnings("ignore", category=ProvisionalCompleterWarning)


def _trust_modules_of_torch() -> None:
    """Have parameters of ``model.part(`` found: the ``__getattr__`` of a ``torch.nn.Module`` is harmless."""
    try:
        from IPython.core.guarded_eval import EVALUATION_POLICIES
    except ImportError:  # until IPython 8.6
        return
    trusted = getattr(EVALUATION_POLICIES.get("limited"), "allowed_getattr_external", None)
    if isinstance(trusted, set):
        trusted.add(("torch", "nn", "Module"))


def complete(shell: InteractiveShell, code: str, cursor: int) -> Matches:
    """What may stand at ``cursor``, in code points."""
    line = code[:cursor].rpartition("\n")[2]
    imported = import_names(line)
    if imported is not None:
        items = [Match(name, "module") for name in imported.names[:MATCHES_MAX]]
        return Matches(cursor - len(imported.typed), cursor, items)
    namespace = dict(shell.user_ns)
    is_python = not line.lstrip().startswith(("!", "%")) and not has_open_quotes(line)
    if is_python and (attributes := attribute_names(line, namespace)) is not None:
        typed, found = attributes
        return Matches(cursor - len(typed), cursor, [Match(name, "attribute") for name in found[:MATCHES_MAX]])
    return _by_ipython(shell, namespace, code, cursor)


def _by_ipython(shell: InteractiveShell, namespace: dict[str, object], code: str, cursor: int) -> Matches:
    """Names, magics, paths, keys, parameters."""
    try:
        found = list(_LiveCompleter(shell, namespace).completions(code, cursor))
    except ProvisionalCompleterWarning:  # the user has turned warnings into errors since
        expect_provisional()
        found = list(_LiveCompleter(shell, namespace).completions(code, cursor))
    if not found:
        return Matches(cursor, cursor, [])
    start, end = min(each.start for each in found), max(each.end for each in found)
    kept = code[start:end].rpartition(".")[0]
    if kept and all(each.start == start and each.text.startswith(f"{kept}.") for each in found):
        start += len(kept) + 1  # some versions of IPython begin at the name before the dot
    items = []
    for each in found:
        text = code[start : each.start] + each.text[max(0, start - each.start) :] + code[each.end : end]
        if len(text) <= TEXT_MAX_CHARS:
            items.append(Match(text, _type(each, namespace), each.signature or ""))
    return Matches(start, end, list(_distinct(items))[:MATCHES_MAX])


def names(shell: InteractiveShell, prefix: str) -> list[str]:
    """The user's names that begin with ``prefix``."""
    hidden = shell.user_ns_hidden
    found = [name for name in dict(shell.user_ns) if name.startswith(prefix) and name not in hidden]
    return sorted(name for name in found if prefix.startswith("_") or not name.startswith("_"))[:MATCHES_MAX]


def describe(shell: InteractiveShell, code: str, cursor: int, detail: int) -> str:
    """What Shift-Tab shows for the name at ``cursor``: as ``name?``, with ``detail`` as ``name??``.

    Empty: there is no such name.
    """
    name = token_at_cursor(code, cursor)
    if not name:
        return ""
    info = shell._ofind(name)
    found = info if isinstance(info, dict) else info.__dict__
    if not found["found"]:
        return ""
    definition = _definition(found["obj"], shell.inspector, name)
    source = oinspect.getsource(found["obj"], name) if detail else None
    return summarise(found["obj"], definition=definition, source=source, doc=oinspect.getdoc(found["obj"]))


def _definition(thing: object, inspector: oinspect.Inspector, name: str) -> str:
    if not callable(thing):
        return ""
    torch = sys.modules.get("torch")
    if torch is not None and isinstance(thing, torch.nn.Module):  # ``__call__`` takes whatever ``forward`` takes
        thing = thing.forward
    return str(inspector._getdef(thing, name) or "")


def _type(found: Completion, namespace: dict[str, object]) -> str:
    """The kind of completion; of names, what they are names of, which IPython knows by jedi only."""
    if found.type != "variable" and found.type not in (None, "", "<unknown>"):
        return str(found.type)
    if keyword.iskeyword(found.text):
        return "keyword"
    value = namespace.get(found.text, vars(builtins).get(found.text, found))
    if value is found:
        return str(found.type or "<unknown>")
    if isinstance(value, type):
        return "class"
    if isinstance(value, ModuleType):
        return "module"
    return "function" if isinstance(value, (FunctionType, BuiltinFunctionType, MethodType)) else "instance"


def _distinct(items: Iterable[Match]) -> Iterable[Match]:
    return {item.text: item for item in reversed(list(items))}.values().__reversed__()


DOC_MAX_CHARS = 100_000
"""Of a docstring or of source text."""

_FIELD = "\x1b[31m{}:\x1b[39m"
_CONTAINERS = (list, tuple, dict, set, frozenset, str, bytes, bytearray, int)
_short = reprlib.Repr()
_short.maxlist = _short.maxtuple = _short.maxset = _short.maxfrozenset = _short.maxdict = 12
_short.maxstring = _short.maxother = 200
_short.maxlong = 80


# ---- an object in words ---------------------------------------------------------------------------------------------


def summarise(thing: object, *, definition: str, source: str | None, doc: str | None) -> str:
    """The text. definition: ``f(a, b=1)``; source: is shown in place of the docstring that it holds."""
    is_class = inspect.isclass(thing)
    fields = [("Init signature" if is_class else "Signature", definition)]
    if doc and not (source and doc in inspect.cleandoc(source)):
        fields.append(("Docstring", doc[:DOC_MAX_CHARS]))
    if source:
        fields.append(("Source", source.rstrip()[:DOC_MAX_CHARS]))
    if is_class:
        fields.append(("Init docstring", _init_doc(thing, doc)))
    fields.append(("File", _file(thing)))
    fields.append(("Type", type(thing).__name__))
    if not (is_class or callable(thing)) or inspect.ismodule(thing):
        fields.insert(1, ("String form", _brief(thing)))
        fields.insert(2, ("Length", _length(thing)))
    return "\n".join(_line(title, text) for title, text in fields if text) + "\n"


def _line(title: str, text: str) -> str:
    apart = "\n" if "\n" in text or title in ("Docstring", "Source", "Init docstring") else " "
    return f"{_FIELD.format(title)}{apart}{text}"


def _brief(thing: object) -> str:
    """Its repr, if that is short and cheap; of arrays what can be said without their values."""
    shape, dtype = getattr(thing, "shape", None), getattr(thing, "dtype", None)
    if shape is not None and dtype is not None:
        device = getattr(thing, "device", None)
        where = f", {device}" if device is not None and str(device) != "cpu" else ""
        return f"shape {tuple(shape)}, {dtype}{where}"
    try:
        text = _short.repr(thing) if isinstance(thing, _CONTAINERS) else str(thing)
    except Exception:
        return ""
    return text if len(text) <= 2000 else f"{text[:1000]} <...> {text[-200:]}"


def _length(thing: object) -> str:
    try:
        return str(len(thing)) if isinstance(thing, Sized) else ""
    except Exception:
        return ""


def _file(thing: Any) -> str:
    """Where it was defined; nothing for what a cell has defined, whose file is not on the disk."""
    try:
        path = inspect.getfile(thing)
    except (TypeError, OSError):
        return ""
    return path if os.path.exists(path) else ""


def _init_doc(thing: object, doc: str | None) -> str:
    text = inspect.getdoc(vars(thing)["__init__"]) if "__init__" in vars(thing) else None
    return text if text and text != doc else ""
