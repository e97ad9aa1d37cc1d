"""The size and the wording of the product in figures that may only fall; `make check` prints them.

    python tests/support/figures.py

`LIMITS` has the most that each figure may be. A change that makes one smaller lowers its limit; a change that needs a
higher one says why in its commit.
"""

from __future__ import annotations

import ast
import itertools
import re
import sys
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path

from check_rooms import ROOT, SOURCES, Modules, importers, parse_all
from late_attributes import set_from_outside

SMALL_LINES = 60
LIMITS: Mapping[str, int] = {
    "product: lines": 82_044,
    "product: statements": 55_971,
    "product: kB": 3_601,
    "product: modules": 393,
    "types of messages between processes": 59,
    "tests and benchmarks: lines": 68_458,
    "docs by hand: kB": 225,
    "modules of one importer and under 60 lines": 0,
    "docstrings without subject and verb": 0,
    "noun clauses in 1,000 words of docstrings": 1,
    "public names of ProcMesh": 49,
    "lines on private names of torch": 21,
    "places that name an engine outside of launchers": 0,
    "places that replace others' names": 13,
    "global statements": 3,
    "attributes that others set later": 4,
    "places that set attributes of other objects": 71,
}
"""The most that each figure may be."""

NO_START = re.compile(
    r"(?:of|by|to|as|with|where|those|what|why|from|at|for|in|on|which|who|whose|whom|how|these|that|when|if|after"
    r"|before|until|without|behind|beyond|under|over|not|also|only|so|all|each|both|some|one|many|most|more|none|nobody"
    r"|nothing|anything|everything|whatever|whoever|like|such|about|between|within|since|while|else|than|somebody)\b",
    re.IGNORECASE,
)
"""Words with which no sentence of a docstring begins: what follows them is no subject."""
NOUN_CLAUSE = re.compile(r"\b(?:what|whatever|whoever|that which|those that|those who)\b", re.IGNORECASE)
DOCUMENTED = ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef
WORD = re.compile(r"[A-Za-z][\w'-]*")
PRIVATE = re.compile(
    r"\btorch(?:\.\w+)*\._(?!_)\w|from torch[\w.]*\._|from torch[\w.]* import (?:.*\W)?_\w|torch\.utils\._"
)
ENGINES = frozenset({"ssh", "slurm", "k8s", "kubernetes", "mpi", "ray"})
"""Names of engines; torch has a backend called mpi, too."""
GENERATED = frozenset(
    {
        "checkpoints.md",
        "command.md",
        "elastic.md",
        "export.md",
        "gallery.md",
        "guests.md",
        "monarch.md",
        "scripts.md",
        "verified.md",
        "watching.md",
    }
)
"""Pages that a command writes, and new guides, which count apart."""


def docstrings(tree: ast.Module) -> Iterator[str]:
    """Yield the docstrings of a module: its own, and those of its classes, functions and attributes."""
    for node in ast.walk(tree):
        if isinstance(node, DOCUMENTED):
            yield ast.get_docstring(node) or ""
        body = getattr(node, "body", None)
        for before, after in itertools.pairwise(body if isinstance(body, list) else ()):
            match before, after:
                case ast.Assign() | ast.AnnAssign(), ast.Expr(ast.Constant(str() as text)):
                    yield text


def has_no_subject(docstring: str) -> bool:
    """Whether a docstring begins with a word behind which no subject and verb can follow."""
    return NO_START.match(docstring.lstrip("`*\"' ")) is not None


def small_modules(modules: Modules) -> Iterator[str]:
    """Yield the names of modules that have one importer and could be a part of it."""
    used = importers(modules)
    for name, (path, tree) in modules.items():
        has_reason = "A module of its own because " in " ".join((ast.get_docstring(tree) or "").split())
        lines = len(path.read_text().splitlines())
        if path.name != "__init__.py" and lines < SMALL_LINES and len(used[name]) == 1 and not has_reason:
            yield name


def lines_that_match(paths: Iterable[Path], pattern: re.Pattern[str]) -> Iterator[str]:
    """Yield ``file:line: text`` for each line of code that a pattern is found in."""
    for path in paths:
        for number, line in enumerate(path.read_text().splitlines(), 1):
            if pattern.search(line.partition("  # ")[0]) and not line.lstrip().startswith("#"):
                yield f"{path.relative_to(ROOT)}:{number}: {line.strip()}"


def public_names_of_proc_mesh() -> list[str]:
    """Return what Tab shows behind a mesh of processes."""
    from meshbook import ProcMesh

    return [name for name in dir(ProcMesh) if not name.startswith("_")]


def engines_outside(modules: Modules) -> Iterator[str]:
    """Yield the places outside of launchers at which code compares or looks up the name of one engine."""
    for name, (path, tree) in modules.items():
        if name.startswith("meshbook.launchers"):
            continue
        for node in ast.walk(tree):
            if isinstance(node, ast.Constant) and isinstance(node.value, str) and node.value in ENGINES:
                yield f"{path.relative_to(ROOT)}:{node.lineno}: {node.value!r}"


def replaced_names(modules: Modules) -> Iterator[str]:
    """Yield the places at which code puts something of ours in the place of a name of other people's code."""
    for path, tree in modules.values():
        for node in ast.walk(tree):
            match node:
                case ast.Call(ast.Name("patch"), [owner, name, _]):
                    yield f"{path.relative_to(ROOT)}:{node.lineno}: {ast.unparse(owner)}, {ast.unparse(name)}"


def global_statements(modules: Modules) -> Iterator[str]:
    """Yield the places at which a function rebinds names of its module."""
    for path, tree in modules.values():
        for node in ast.walk(tree):
            if isinstance(node, ast.Global):
                yield f"{path.relative_to(ROOT)}:{node.lineno}: {', '.join(node.names)}"


def lists() -> dict[str, list[str]]:
    """Return what is counted in lists, by figure."""
    modules = parse_all(SOURCES)
    places, parts = set_from_outside(list(modules.values()))
    texts = [(name, text) for name, (_, tree) in modules.items() for text in docstrings(tree)]
    return {
        "modules of one importer and under 60 lines": list(small_modules(modules)),
        "docstrings without subject and verb": [
            f"{name}: {text.splitlines()[0]}" for name, text in texts if has_no_subject(text)
        ],
        "public names of ProcMesh": public_names_of_proc_mesh(),
        "lines on private names of torch": list(lines_that_match((path for path, _ in modules.values()), PRIVATE)),
        "places that name an engine outside of launchers": list(engines_outside(modules)),
        "places that replace others' names": list(replaced_names(modules)),
        "global statements": list(global_statements(modules)),
        "attributes that others set later": parts,
        "places that set attributes of other objects": places,
    }


def measure() -> dict[str, int]:
    """Return each figure by its name in `LIMITS`."""
    modules = parse_all(SOURCES)
    paths = [path for path, _ in modules.values()]
    others = [path for folder in ("tests", "benchmarks") for path in (ROOT / folder).rglob("*.py")]
    words = [word for _, tree in modules.values() for text in docstrings(tree) for word in WORD.findall(text)]
    clauses = sum(len(NOUN_CLAUSE.findall(text)) for _, tree in modules.values() for text in docstrings(tree))
    pages = [page for page in (ROOT / "docs").rglob("*.md") if page.name not in GENERATED]
    return {
        "product: lines": sum(len(path.read_text().splitlines()) for path in paths),
        "product: statements": sum(
            isinstance(node, ast.stmt) for _, tree in modules.values() for node in ast.walk(tree)
        ),
        "product: kB": sum(path.stat().st_size for path in paths) // 1000,
        "product: modules": len(modules),
        "types of messages between processes": sum(
            isinstance(node, ast.ClassDef) and any(ast.unparse(base) == "Header" for base in node.bases)
            for _, tree in modules.values()
            for node in ast.walk(tree)
        ),
        "tests and benchmarks: lines": sum(len(path.read_text().splitlines()) for path in others),
        "docs by hand: kB": sum(page.stat().st_size for page in pages) // 1000,
        "noun clauses in 1,000 words of docstrings": round(1000 * clauses / len(words)),
        **{name: len(found) for name, found in lists().items()},
    }


def main(arguments: list[str]) -> int:
    """Print the figures, or with words of a figure's name its list; returns 1 where a figure is above its limit."""
    if arguments:
        for name, found in lists().items():
            if all(word in name for word in arguments):
                print("\n".join(found))
        return 0
    measured = measure()
    above = [name for name, value in measured.items() if value > LIMITS[name]]
    for name, value in measured.items():
        print(f"{name:48} {value:>9,}{f'  above its limit of {LIMITS[name]:,}' if name in above else ''}")
    return 1 if above else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
