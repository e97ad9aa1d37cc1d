"""What the layout promises and no other tool sees; `make check` runs it.

    python tests/support/check_rooms.py [FOLDER ...]

One name, one type: no class or type alias of a module's top level has a twin in another module. No page of a few lines:
a module under `SHORT` lines has `USED` importers, or says ``A module of its own because ...`` in its docstring. In
the rooms of the processes no module imports itself by way of others, not even for the type checker. And each room's
``__init__`` begins with its purpose in one sentence. What moves is found where others speak of it: names in
back quotes, ``meshbook.room.module.Name`` or, in pages, ``room/module.py:Name``, links, names that tests replace, and
imports in programs, those too that stand as texts in tests.
"""

from __future__ import annotations

import ast
import graphlib
import itertools
import re
import sys
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path

ROOT = Path(__file__).parents[2]
SOURCES = tuple(ROOT / name for name in ("runtime", "extension", "kernel"))
SHORT, USED = 40, 3
REASON = "A module of its own because "
TWINS_ALLOWED: frozenset[str] = frozenset()
"""Type variables are no types and need no place here."""
TYPE_FACTORIES = {"NewType", "NamedTuple", "TypedDict", "Enum", "namedtuple", "defstruct"}
PROCESSES = ("meshbook.agent", "meshbook.controller", "meshbook.worker")
"""The rooms of processes, none of whose modules imports itself by way of others."""
ENTRY_POINTS = {"__main__", "_version"}
REFERENCE = re.compile(r"`(meshbook(?:_extension|_kernel)?(?:\.\w+)+)`")
LINK = re.compile(r"\]\(([^)#: ]+)(?:#[^)]*)?\)")
PLACE = re.compile(r"`((?:\w+/)+\w+\.py)(?::([\w.]+))?`")
PATCHED = re.compile(r"""(?:setattr|patch)\(\s*["'](meshbook[\w.]+)["']""")
IMPORT = re.compile(r"\bfrom (meshbook[\w.]*) import (?:\\?\(\s*)?(\w+(?: as \w+)?(?:,\s*\w+(?: as \w+)?)*)")
PROGRAMS = ("tests/**/*.py", "benchmarks/**/*.py", "notebooks/*.ipynb", "*.md", "docs/**/*.md")
"""Files with programs in them, as texts that no other tool reads."""
PAGES = ("*.md", "docs/*.md", "changes/*.md")
"""Names in these, too, and their links."""

Modules = Mapping[str, tuple[Path, ast.Module]]


def parse_all(folders: Iterable[Path]) -> dict[str, tuple[Path, ast.Module]]:
    """The modules below source folders by their dotted names."""
    found = {}
    for folder in folders:
        for path in sorted(folder.rglob("*.py")):
            parts = path.relative_to(folder).with_suffix("").parts
            name = ".".join(parts[:-1] if parts[-1] == "__init__" else parts)
            found[name] = (path, ast.parse(path.read_text()))
    return found


def types_of(tree: ast.Module) -> Iterator[str]:
    """The names of the classes and type aliases that a module makes at its top level."""
    pending: list[ast.stmt] = list(tree.body)
    while pending:
        match pending.pop():
            case ast.ClassDef(name=name):
                yield name
            case ast.AnnAssign(target=ast.Name(id=name), annotation=ast.Name(id="TypeAlias")):
                yield name
            case ast.Assign(targets=[ast.Name(id=name)], value=value) if _makes_a_type(name, value):
                yield name
            case ast.If(body=body, orelse=orelse) | ast.Try(body=body, orelse=orelse):
                pending += [*body, *orelse]


def _makes_a_type(name: str, value: ast.expr) -> bool:
    if name.isupper() or not name.lstrip("_")[:1].isupper():
        return False
    if isinstance(value, ast.Call):
        return ast.unparse(value.func).rpartition(".")[2] in TYPE_FACTORIES
    return isinstance(value, ast.Subscript | ast.BinOp | ast.Name | ast.Attribute)


def twins(modules: Modules) -> Iterator[str]:
    """One line for each type name that two modules define."""
    places: dict[str, set[str]] = defaultdict(set)
    for module, (_, tree) in modules.items():
        for name in types_of(tree):
            places[name].add(module)
    for name, where in sorted(places.items()):
        if len(where) > 1 and name not in TWINS_ALLOWED:
            yield f"{name} is a type in {' and in '.join(sorted(where))}: rename one, or import it from the other"


def importers(modules: Modules) -> dict[str, set[str]]:
    """By module, those that import it, at any place in them."""
    found: dict[str, set[str]] = defaultdict(set)
    for module, (_, tree) in modules.items():
        for node in ast.walk(tree):
            names: list[str] = []
            if isinstance(node, ast.Import):
                names = [alias.name for alias in node.names]
            elif isinstance(node, ast.ImportFrom) and node.module:
                names = [node.module, *(f"{node.module}.{alias.name}" for alias in node.names)]
            for name in names:
                if name in modules and name != module:
                    found[name].add(module)
    return found


def cycles(modules: Modules, rooms: Iterable[str]) -> Iterator[str]:
    """One line for the first cycle of imports in each room, those for the type checker included."""
    used = importers(modules)
    for room in rooms:
        inside = {name: used[name] & modules.keys() for name in modules if name.startswith(f"{room}.")}
        try:
            graphlib.TopologicalSorter(inside).prepare()
        except graphlib.CycleError as error:
            yield f"{room} imports itself: {' < '.join(error.args[1])}"


def short_modules(modules: Modules) -> Iterator[str]:
    """One line for each module that is too short to be one, and does not say why it is."""
    used = importers(modules)
    for name, (path, tree) in modules.items():
        lines = len(path.read_text().splitlines())
        if path.name == "__init__.py" or name.rpartition(".")[2] in ENTRY_POINTS:
            continue
        docstring = " ".join((ast.get_docstring(tree) or "").split())
        if lines < SHORT and len(used[name]) < USED and REASON not in docstring:
            yield (
                f"{name} has {lines} lines and {len(used[name])} importers: move it to its neighbour, or say "
                f'"{REASON}..." in its docstring'
            )


def rooms_without_purpose(modules: Modules) -> Iterator[str]:
    """One line for each package whose docstring does not begin with one sentence."""
    for name, (path, tree) in modules.items():
        if path.name == "__init__.py":
            purpose = (ast.get_docstring(tree) or "").partition("\n\n")[0]
            if not purpose.endswith(".") or len(purpose) < 10:
                yield f"{name}: its __init__ begins with no sentence that says what the room is for"


def _names_in(tree: ast.Module) -> set[str]:
    """What a module makes or imports, at whatever depth: members of its classes too."""
    names = set()
    for node in ast.walk(tree):
        match node:
            case ast.ClassDef(name=name) | ast.FunctionDef(name=name) | ast.AsyncFunctionDef(name=name):
                names.add(name)
            case ast.Name(id=name, ctx=ast.Store()) | ast.Attribute(attr=name, ctx=ast.Store()):
                names.add(name)
            case ast.alias(name=name, asname=asname):
                names.add(asname or name.partition(".")[0])
    return names


def _leads_somewhere(modules: Modules, reference: str, depth: int | None = None) -> bool:
    """Whether a dotted name is a module's, or something in one; ``depth`` limits the names behind the module."""
    parts = reference.split(".")
    candidates = (".".join(parts[:end]) for end in range(len(parts), 0, -1))
    module = next((name for name in candidates if name in modules), None)
    if module is None:
        return False
    return _names_in(modules[module][1]).issuperset(parts[module.count(".") + 1 :][:depth])


def dead_patches(modules: Modules, tests: Iterable[Path]) -> Iterator[str]:
    """One line for each name that a test replaces and that is not there: the test may be skipped where others run."""
    for path in tests:
        for name in PATCHED.findall(path.read_text()):
            if not _leads_somewhere(modules, name, depth=1):
                yield f"{path.name} replaces {name}, which is not there"


def dead_imports(modules: Modules, programs: Iterable[Path]) -> Iterator[str]:
    """One line for each name that a program imports, perhaps within a text, and that is not there."""
    for path in programs:
        for module, names in IMPORT.findall(path.read_text()):
            for name in re.findall(r"(\w+)(?: as \w+)?", names):
                if module in modules and not _exports(modules, module, name):
                    yield f"{path.relative_to(ROOT)} imports {name} from {module}, which has none"
            if module not in modules:
                yield f"{path.relative_to(ROOT)} imports {module}, which is not there"


def _exports(modules: Modules, module: str, name: str) -> bool:
    text = modules[module][0].read_text()
    is_open = "def __getattr__" in text or "import *" in text
    return f"{module}.{name}" in modules or is_open or _leads_somewhere(modules, f"{module}.{name}", depth=1)


def dead_references(modules: Modules, pages: Iterable[Path]) -> Iterator[str]:
    """One line for each name in back quotes, in a module or a page, that leads nowhere."""
    for path in itertools.chain((path for path, _ in modules.values()), pages):
        for reference in REFERENCE.findall(path.read_text()):
            if not _leads_somewhere(modules, reference):
                yield f"{path.name} speaks of {reference}, which is not there"


def dead_links(pages: Iterable[Path]) -> Iterator[str]:
    """One line for each link of a page to a file that is not there."""
    for page in pages:
        for link in LINK.findall(page.read_text()):
            if not (page.parent / link).exists():
                yield f"{page.name} links to {link}, which is not there"


def _finds_place(path: str, name: str) -> bool:
    """Whether a package has this file, and the file this name with its members."""
    for folder in (ROOT, *(folder for source in SOURCES for folder in (source, *source.iterdir()))):
        if (file := folder / path).is_file():
            return not name or _names_in(ast.parse(file.read_text())).issuperset(name.split("."))
    return False


def dead_places(pages: Iterable[Path]) -> Iterator[str]:
    """One line for each ``room/module.py:Name`` of a page that leads nowhere."""
    for page in pages:
        for path, name in PLACE.findall(page.read_text()):
            if not _finds_place(path, name):
                yield f"{page.name} speaks of {path}{name and ':' + name}, which is not there"


def main(arguments: list[str]) -> int:
    """Print what is wrong; returns the exit code."""
    modules = parse_all([Path(argument) for argument in arguments] or SOURCES)
    pages = [] if arguments else [page for pattern in PAGES for page in ROOT.glob(pattern)]
    wrong = [*twins(modules), *short_modules(modules), *rooms_without_purpose(modules), *cycles(modules, PROCESSES)]
    tests = [] if arguments else ROOT.glob("tests/**/*.py")
    programs = [] if arguments else [path for pattern in PROGRAMS for path in ROOT.glob(pattern)]
    wrong += [
        *dead_patches(modules, tests),
        *dead_imports(modules, programs),
        *dead_references(modules, pages),
        *dead_links(pages),
        *dead_places(pages),
    ]
    print("\n".join(wrong) or f"Rooms are in order: {len(modules)} modules.")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
