"""Completion on a rank over its living names, on a side thread while the main thread computes.

IPython's completer gives names, magics, paths, keys and parameters. jedi is off: the objects are there, and it takes
seconds with torch. Each question gets a completer of its own, over a copy of the namespace, since the main thread goes
on.

Attributes and import statements are our own, since completing runs no code of the user beyond ``__dir__``. IPython's
policy "limited" asks cached properties, descriptors and ``tensor.T``, which a DTensor computes together with other
ranks; it finds nothing behind ``model.layers[0].``; and its completer imports modules to list their names.
"""

# mypy: disable-error-code="no-untyped-call"

from __future__ import annotations

import ast
import builtins
import contextlib
import functools
import importlib.machinery
import inspect
import keyword
import pkgutil
import re
import sys
import time
import warnings
from collections.abc import Iterable, Mapping, Sequence
from itertools import islice
from pathlib import Path
from types import BuiltinFunctionType, FunctionType, MethodType, ModuleType
from typing import TYPE_CHECKING

from IPython.core.completer import IPCompleter, ProvisionalCompleterWarning, has_open_quotes

from meshbook.calls.rank_state import Completions
from meshbook.system.descriptors import above_standard

if TYPE_CHECKING:
    from IPython.core.completer import Completion
    from IPython.core.interactiveshell import InteractiveShell

MATCHES_MAX = 2000
"""The most completions of one answer: front ends filter them as one types on, so ``torch.`` had better bring all."""

NAMES_MAX = 10_000
"""The most names of an object that are looked at: completion must not take the GIL for long."""

TEXT_MAX_CHARS = 500
"""A completion that is longer (a key of a dict, say) is left out."""


class _LiveCompleter(IPCompleter):
    """IPython's completer without jedi, over the names of one moment."""

    def __init__(self, shell: InteractiveShell, namespace: dict[str, object]) -> None:
        super().__init__(shell=shell, namespace=namespace, global_namespace={})
        self.use_jedi = False
        if self.has_trait("evaluation"):  # from IPython 8.6
            self.evaluation = "limited"
        self.custom_completers = shell.Completer.custom_completers

    def fwd_unicode_match(self, text: str) -> tuple[str, Sequence[str]]:
        """Complete ``\\alp`` by the shell's own completer, which keeps the names of all characters once it has them."""
        return self.shell.Completer.fwd_unicode_match(text) if "\\" in text else ("", ())

    @staticmethod
    def _get_keys(obj: object) -> list[object]:
        if isinstance(obj, dict):
            return list(islice(obj, MATCHES_MAX))
        return list(IPCompleter._get_keys(obj))[:MATCHES_MAX]


def prepare() -> None:
    """Make IPython's completer fit for ranks, once per process."""
    _expect_provisional()
    try:
        from IPython.core.guarded_eval import EVALUATION_POLICIES
    except ImportError:  # until IPython 8.6
        return
    trusted = getattr(EVALUATION_POLICIES.get("limited"), "allowed_getattr_external", None)
    if isinstance(trusted, set):  # parameters of ``model.part(``: the ``__getattr__`` of modules is harmless
        trusted.add(("torch", "nn", "Module"))


def _expect_provisional() -> None:
    # IPython's completer warns that it may change, or raises that. Its way around that is for one thread only.
    warnings.filterwarnings("ignore", category=ProvisionalCompleterWarning)


def complete(shell: InteractiveShell, code: str, cursor: int) -> Completions:
    """Return the texts that may stand at ``cursor``, in code points, each with its kind and signature."""
    line = code[:cursor].rpartition("\n")[2]
    namespace = dict(shell.user_ns)
    found, kind = import_names(line), "module"
    if found is None and not line.lstrip().startswith(("!", "%")) and not has_open_quotes(line):
        found, kind = attribute_names(line, namespace), "attribute"
    if found is None:
        return _by_ipython(shell, namespace, code, cursor)
    typed, names = found
    return Completions(cursor - len(typed), cursor, [(name, kind, "") for name in names[:MATCHES_MAX]])


def _by_ipython(shell: InteractiveShell, namespace: dict[str, object], code: str, cursor: int) -> Completions:
    try:
        found = list(_LiveCompleter(shell, namespace).completions(code, cursor))
    except ProvisionalCompleterWarning:  # the user has turned warnings into errors since
        _expect_provisional()
        found = list(_LiveCompleter(shell, namespace).completions(code, cursor))
    if not found:
        return Completions(cursor, cursor, [])
    start, end = min(each.start for each in found), max(each.end for each in found)
    kept = code[start:end].rpartition(".")[0]
    if kept and all(each.start == start and each.text.startswith(f"{kept}.") for each in found):
        start += len(kept) + 1  # some versions of IPython begin at the name before the dot
    items: dict[str, tuple[str, str, str]] = {}
    for each in found:
        text = code[start : each.start] + each.text[max(0, start - each.start) :] + code[each.end : end]
        if len(text) <= TEXT_MAX_CHARS:
            items.setdefault(text, (text, _kind(each, namespace), each.signature or ""))
    return Completions(start, end, list(items.values())[:MATCHES_MAX])


def _kind(found: Completion, namespace: dict[str, object]) -> str:
    """Return the kind of a completion; of a name the kind of its value, which IPython knows by jedi only."""
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


def user_names(shell: InteractiveShell, prefix: str) -> list[str]:
    """Return the user's names that begin with ``prefix``."""
    hidden = shell.user_ns_hidden
    found = [name for name in dict(shell.user_ns) if name.startswith(prefix) and name not in hidden]
    return sorted(name for name in found if prefix.startswith("_") or not name.startswith("_"))[:MATCHES_MAX]


def _beginning_with(typed: str, names: Iterable[object]) -> tuple[str, list[str]]:
    """Return ``typed`` and the names that begin so; names with an underscore only where one is typed."""
    found = {name for name in names if isinstance(name, str) and name.startswith(typed)}
    return typed, sorted(name for name in found if typed.startswith("_") or not name.startswith("_"))


# ---- attributes -----------------------------------------------------------------------------------------------------

_CHAIN = re.compile(r"(?<![\w.\])}\"'])([^\W\d]\w*(?:\.[^\W\d]\w*|\[(?:-?\d+|'[^'\\]*'|\"[^\"\\]*\")\])*)\.(\w*)$")
_ATTRIBUTES_TRUSTED = re.compile(r"(torch|numpy|pandas|builtins)(\.|$)")
"""Modules whose properties and ``__getattr__`` do no more than they seem to."""

_ITEMS_TRUSTED = re.compile(r"(torch\.nn|numpy|pandas|collections|builtins)(\.|$)")
"""The modules whose ``__getitem__`` only looks a value up; that of torch.utils.data loads something."""

_OPERATIONS = frozenset({"T", "mT", "H", "mH", "real", "imag"})
"""Attributes of tensors that compute; of a DTensor, together with other ranks."""

_PLAIN_LOOKUPS: tuple[object, ...] = (object.__getattribute__, type.__getattribute__, ModuleType.__getattribute__)
_MISSING = object()


class _Refused(Exception):
    """Code of the user would run, or there is no such thing."""


def attribute_names(before: str, namespace: Mapping[str, object]) -> tuple[str, list[str]] | None:
    """Return the beginning of an attribute at the end of ``before``, and the names that begin so.

    Returns None where no chain of names stands there, or following it would run code of the user.
    """
    if (found := _CHAIN.search(before)) is None:
        return None
    try:
        thing = _value(ast.parse(found[1], mode="eval").body, namespace)
    except (_Refused, SyntaxError):
        return None
    return _beginning_with(found[2], _listed(thing))


def _listed(thing: object) -> Sequence[object]:
    """Return `NAMES_MAX` names of ``dir`` at most; those of the type where ``__dir__`` fails."""
    for _ in range(2):  # the main thread may change what is being listed
        with contextlib.suppress(Exception):
            return [*islice(dir(thing), NAMES_MAX), *dir(type(thing))]
    return dir(type(thing))


def _value(node: ast.expr, namespace: Mapping[str, object]) -> object:
    """Return the value of a chain of names, attributes and literal indices. Raises: _Refused."""
    if isinstance(node, ast.Name):
        value = namespace.get(node.id, vars(builtins).get(node.id, _MISSING))
    elif isinstance(node, ast.Attribute):
        value = _attribute(_value(node.value, namespace), node.attr)
    elif isinstance(node, ast.Subscript):
        value = _item(_value(node.value, namespace), ast.literal_eval(node.slice))
    else:
        raise _Refused
    if value is _MISSING:
        raise _Refused
    return value


def _attribute(thing: object, name: str) -> object:
    if type(thing).__getattribute__ not in _PLAIN_LOOKUPS and not _is_from(type(thing), _ATTRIBUTES_TRUSTED):
        raise _Refused
    if _is_tensor(thing) and name in _OPERATIONS:
        raise _Refused
    static = inspect.getattr_static(thing, name, _MISSING)
    runs: object = None
    if static is _MISSING:
        runs = getattr(type(thing), "__getattr__", None)
    elif isinstance(static, property):
        runs = static.fget
    elif isinstance(static, functools.cached_property):
        runs = static.func
    if runs is not None and not _is_from(runs, _ATTRIBUTES_TRUSTED):
        raise _Refused
    try:
        return getattr(thing, name, _MISSING)
    except Exception:
        return _MISSING


def _item(thing: object, key: object) -> object:
    lookup = getattr(type(thing), "__getitem__", None)
    if lookup is None or _is_tensor(thing) or not _is_from(lookup, _ITEMS_TRUSTED):
        raise _Refused
    try:
        return lookup(thing, key)
    except Exception:
        return _MISSING


def _is_tensor(thing: object) -> bool:
    return hasattr(type(thing), "__torch_function__")


def _is_from(thing: object, packages: re.Pattern[str]) -> bool:
    """Whether a class, a function or a slot of a class in C comes from one of these packages."""
    module = getattr(getattr(thing, "__objclass__", thing), "__module__", None)
    return isinstance(module, str) and packages.match(module) is not None


# ---- import statements ----------------------------------------------------------------------------------------------

SOURCE_MAX_BYTES = 1 << 20
TOP_LEVEL_FRESH_S = 30.0
"""The time for which the list of all modules may be used; then the folders are read again."""

_FROM = re.compile(r"\s*from\s+([\w.]+)\s+import\s+\(?(?:[\w\s,]*[,\s(])?(\w*)$")
_MODULE = re.compile(r"\s*(?:from\s+|import\s+(?:[\w.\s]+,)*\s*)(?:([\w.]+)\.)?(\w*)$")
_BETWEEN = re.compile(r"\s*from\s+[\w.]+\s+(i?m?p?o?r?)$")


def import_names(line: str) -> tuple[str, list[str]] | None:
    """Return the beginning of a name at the end of an import statement, and the names that begin so, else None.

    Nothing is imported for that: modules that are loaded are looked into, others are read.
    """
    if found := _FROM.fullmatch(line):
        return _beginning_with(found[2], _names_in(found[1]))
    if found := _BETWEEN.fullmatch(line):
        return _beginning_with(found[1], ["import"])
    if found := _MODULE.fullmatch(line):
        return _beginning_with(found[2], _submodules(found[1]) if found[1] else top_level())
    return None


def top_level() -> list[str]:
    """Return the names of all modules that could be imported, or have been."""
    return _top_level_on(tuple(sys.path), time.monotonic() // TOP_LEVEL_FRESH_S)


@functools.lru_cache(maxsize=1)
def _top_level_on(path: tuple[str, ...], period: float) -> list[str]:
    found = {module.name for module in pkgutil.iter_modules(path)} | set(sys.builtin_module_names)
    return sorted(found | {name for name in tuple(sys.modules) if "." not in name})


def _submodules(package: str) -> list[str]:
    if (loaded := sys.modules.get(package)) is not None:
        folders = list(getattr(loaded, "__path__", ()))
    else:
        spec = _find(package)
        folders = list(spec.submodule_search_locations or ()) if spec is not None else []
    return [module.name for module in pkgutil.iter_modules(folders)]


def _names_in(module: str) -> list[str]:
    """Return the names that ``from module import`` finds."""
    if (loaded := sys.modules.get(module)) is not None:
        return [*dir(loaded), *_submodules(module)]
    spec = _find(module)
    return [*(_defined_in(spec.origin) if spec is not None and spec.origin else ()), *_submodules(module)]


def _find(module: str) -> importlib.machinery.ModuleSpec | None:
    """Return the spec, found from the top down: `importlib.util.find_spec` would import the parents."""
    folders: Sequence[str] | None = None
    spec = None
    parts = module.split(".")
    for end in range(1, len(parts) + 1):
        spec = importlib.machinery.PathFinder.find_spec(".".join(parts[:end]), folders)
        if spec is None:
            return None
        folders = list(spec.submodule_search_locations or ())
    return spec


def _defined_in(path: str) -> list[str]:
    """Return the names that a source file binds at its top level."""
    source = Path(path)
    if source.suffix != ".py" or source.stat().st_size > SOURCE_MAX_BYTES:
        return []
    with above_standard():
        text = source.read_bytes()
    names: list[str] = []
    for node in ast.parse(text).body:
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
            names.append(node.name)
        elif isinstance(node, (ast.Import, ast.ImportFrom)):
            names += [(alias.asname or alias.name).partition(".")[0] for alias in node.names if alias.name != "*"]
        elif isinstance(node, (ast.Assign, ast.AnnAssign)):
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            names += [name.id for target in targets for name in ast.walk(target) if isinstance(name, ast.Name)]
    return names
