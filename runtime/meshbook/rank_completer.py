"""IPython's completer and inspector over a rank's living names, on a side thread while the main thread computes.

Nothing is guessed (jedi is off: the objects are there, and it takes seconds with torch) and nothing of the user's runs
beyond what looking at an object means: ``__dir__``, attributes without properties. Each question gets a completer of
its own, over a copy of the namespace, since the main thread goes on.
"""

# mypy: disable-error-code="no-untyped-call"

from __future__ import annotations

import builtins
import keyword
import warnings
from collections.abc import Iterable
from itertools import islice
from types import BuiltinFunctionType, FunctionType, MethodType, ModuleType
from typing import Any, NamedTuple

from IPython.core import completer as ipython_completer
from IPython.core import oinspect
from IPython.core.completer import IPCompleter, ProvisionalCompleterWarning
from IPython.utils.tokenutil import token_at_cursor

from meshbook.import_names import import_names
from meshbook.object_summary import summarise

MATCHES_MAX = 2000
"""Front ends filter what they have got as one types on, so that ``torch.`` had better bring all of its names."""

LOOKED_AT_MAX = 10_000
"""Names that an object may list before the rest is left out: completion must not take the GIL for long."""

TEXT_MAX_CHARS = 500
"""A completion that is longer (a key of a dict, say) is left out."""


TORCH_CONTAINERS = ("Sequential", "ModuleList", "ModuleDict", "ParameterList", "ParameterDict")


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

    def __init__(self, shell: Any, namespace: dict[str, Any]) -> None:
        super().__init__(shell=shell, namespace=namespace, global_namespace={})
        self.use_jedi = False
        if self.has_trait("evaluation"):  # from IPython 8.6
            self.evaluation = "limited"
        self.custom_completers = shell.Completer.custom_completers

    def _attr_matches(self, *args: Any, **options: Any) -> tuple[list[str], str]:
        """As IPython's (from 8.8), which sorts, types and wraps each of them afterwards."""
        found, fragment = super()._attr_matches(*args, **options)
        many = len(found) > MATCHES_MAX
        return [name for name in found if not (many and "._" in name)][:MATCHES_MAX], fragment

    @staticmethod
    def _get_keys(obj: Any) -> list[Any]:
        if isinstance(obj, dict):
            return list(islice(obj, MATCHES_MAX))
        return list(IPCompleter._get_keys(obj))[:MATCHES_MAX]


def prepare() -> None:
    """Once per process: make IPython's completer fit for ranks."""
    expect_provisional()
    ipython_completer.MATCHES_LIMIT = MATCHES_MAX
    vars(ipython_completer)["dir2"] = _attributes
    _trust_containers_of_torch()


def expect_provisional() -> None:
    """IPython's completer warns that it may change, or raises that. Its way around that is for one thread only."""
    warnings.filterwarnings("ignore", category=ProvisionalCompleterWarning)


def _attributes(thing: Any) -> list[str]:
    """As IPython's ``dir2``, of so many names only; those of the type where ``__dir__`` fails."""
    try:
        found = list(dir(thing))
    except Exception:
        found = []
    found = found[:LOOKED_AT_MAX] + dir(type(thing))
    return sorted({name for name in found if isinstance(name, str)})


def _trust_containers_of_torch() -> None:
    """Have parts of a ``torch.nn.Module`` looked at: its own ``__getattr__`` and ``__getitem__`` are harmless."""
    try:
        from IPython.core.guarded_eval import EVALUATION_POLICIES
    except ImportError:  # until IPython 8.6
        return
    policy = EVALUATION_POLICIES.get("limited")
    attributes: Any = getattr(policy, "allowed_getattr_external", None)
    items: Any = getattr(policy, "allowed_getitem_external", None)
    if isinstance(attributes, set) and isinstance(items, set):
        attributes.add(("torch", "nn", "Module"))
        items.update(("torch", "nn", name) for name in TORCH_CONTAINERS)


def complete(shell: Any, code: str, cursor: int) -> Matches:
    """What may stand at ``cursor``, in code points."""
    before = code[:cursor]
    imported = import_names(before.rpartition("\n")[2])
    if imported is not None:
        items = [Match(name, "module") for name in imported.names[:MATCHES_MAX]]
        return Matches(cursor - len(imported.typed), cursor, items)
    namespace = dict(shell.user_ns)
    try:
        found = list(_LiveCompleter(shell, namespace).completions(code, cursor))
    except ProvisionalCompleterWarning:  # the user has turned warnings into errors since
        expect_provisional()
        found = list(_LiveCompleter(shell, namespace).completions(code, cursor))
    if not found:
        return Matches(cursor, cursor, [])
    start, end = min(each.start for each in found), max(each.end for each in found)
    if all(each.start == start and each.text.startswith(".") for each in found) and code[start] == ".":
        start += 1  # from IPython 9.1; the dot stands there already
    items = []
    for each in found:
        text = code[start : each.start] + each.text[max(0, start - each.start) :] + code[each.end : end]
        if len(text) <= TEXT_MAX_CHARS:
            items.append(Match(text, _type(each, namespace), each.signature or ""))
    return Matches(start, end, list(_distinct(items))[:MATCHES_MAX])


def names(shell: Any, prefix: str) -> list[str]:
    """The user's names that begin with ``prefix``."""
    hidden = shell.user_ns_hidden
    found = [name for name in dict(shell.user_ns) if name.startswith(prefix) and name not in hidden]
    return sorted(name for name in found if prefix.startswith("_") or not name.startswith("_"))[:MATCHES_MAX]


def describe(shell: Any, code: str, cursor: int, detail: int) -> str:
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


def _definition(thing: Any, inspector: Any, name: str) -> str:
    if not callable(thing):
        return ""
    return str(inspector._getdef(thing, name) or "")


def _type(found: Any, namespace: dict[str, Any]) -> str:
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
