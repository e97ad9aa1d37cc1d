"""``make monarch``: our programs under Monarch and here, and the page that compares the names.

python -m benchmarks.monarch            compares the answers; ends with 1 where one differs that should not
python -m benchmarks.monarch --page     writes docs/monarch.md of both surfaces and these answers
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from benchmarks.monarch.notes import BETTER, CUT, DIFFERENCES, INSTEAD, PARTS, SOMETIMES
from benchmarks.peers.environments import PEERS, ROOT, python_of, version_of

HERE = Path(__file__).parent
PAGE = ROOT / "docs" / "monarch.md"
TIMEOUT_S = 600.0
ON_INSTANCES = frozenset({"mesh", "return_undeliverable"})
"""Attributes that our classes set in ``__init__``, so that the class has none of the name."""
ELSEWHERE = ("`meshbook.", "`from meshbook", "`tensor.")
"""How a note begins that says where a name is."""
OF_TYPES = frozenset({"Actor", "SPMDActor"})
"""Classes whose remaining names are those of their meshes, which type checkers see."""


def main(arguments: list[str]) -> int:
    monarch = next(peer for peer in PEERS if peer.name == "monarch")
    python = python_of(monarch)
    both = answers(python, "monarch"), answers(Path(sys.executable), "meshbook")
    shapes, ours_of_shapes = (each["shapes"] for each in both)
    unlike = [name for name in shapes if not agree(shapes[name], ours_of_shapes[name])]
    for name in unlike:
        print(f"{name}\n  monarch   {shapes[name]}\n  meshbook  {ours_of_shapes[name]}")
    print(f"{len(shapes) - len(unlike)} of {len(shapes)} random expressions of shapes are equal")
    theirs, ours = (each["programs"] for each in both)
    differs = [name for name in theirs if not agree(theirs[name], ours.get(name, "nothing"))]
    for name in differs:
        print(f"{name}\n  monarch   {theirs[name]}\n  meshbook  {ours.get(name)}\n  {DIFFERENCES.get(name, 'NEW')}")
    surprises = sorted((set(differs) ^ DIFFERENCES.keys()) - SOMETIMES)
    equal = len(theirs) - len(differs)
    told = f"of {len(theirs)} programs {equal} are equal, {len(differs)} differ on purpose; {len(CUT)} names are cut"
    print(told if not surprises else f"{told}; but not: {surprises}")
    if "--page" in arguments:
        here, there = surface(Path(sys.executable), "meshbook"), surface(python, "monarch")
        PAGE.write_text(page(there, here, version_of(monarch, python), equal, len(theirs), len(shapes)))
    return 1 if surprises or unlike else 0


def answers(python: Path, package: str) -> dict[str, dict[str, str]]:
    """Run the programs, and expressions of shapes, with the package in the place of ours."""
    with tempfile.TemporaryDirectory() as folder:
        for path in HERE.glob("*programs.py"):
            text = path.read_text()
            (Path(folder) / path.name).write_text(text if package == "meshbook" else as_monarchs(text))
        ours = os.environ.get("PYTHONPATH") if package == "meshbook" else None
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, [folder, ours]))}
        done = subprocess.run(
            [str(python), "programs.py"], cwd=folder, env=environment, capture_output=True, text=True, timeout=TIMEOUT_S
        )
    for line in done.stdout.splitlines():
        if line.startswith("ANSWERS "):
            found: dict[str, dict[str, str]] = json.loads(line.removeprefix("ANSWERS "))
            return found
    raise SystemExit(f"the programs did not end under {package}:\n{done.stdout[-2000:]}\n{done.stderr[-2000:]}")


def as_monarchs(text: str) -> str:
    """Return a program with Monarch's imports in place of ours: those of `meshbook.monarch` come from monarch.actor."""
    text = re.sub(r"meshbook\.monarch(?=\.(?:config|job|rdma|spmd)\b)", "monarch", text)
    return text.replace("meshbook.monarch", "monarch.actor").replace("meshbook", "monarch")


def agree(theirs: str, ours: str) -> bool:
    """Whether both are one answer; an error of ours is also what theirs is."""
    if theirs.startswith("raises") and ours.startswith("raises"):
        return set(theirs.split()) <= set(ours.split())
    return theirs == ours


def surface(python: Path, package: str) -> dict[str, dict[str, list[str]]]:
    """The public names, as `benchmarks.monarch.surface` tells them."""
    done = subprocess.run(
        [str(python), str(HERE / "surface.py"), package], capture_output=True, text=True, timeout=TIMEOUT_S, check=True
    )
    found: dict[str, dict[str, list[str]]] = json.loads(done.stdout.strip().splitlines()[-1])
    return found


def page(theirs: Any, ours: Any, version: str, equal: int, programs: int, shapes: int) -> str:
    """The whole page."""
    rows = {
        module: [row(name, names[name], ours.get(module, {})) for name in names] for module, names in theirs.items()
    }
    absent = "| not here |", "| elsewhere |", "| cut |"
    there = sum(not any(word in each for word in absent) for each in rows["actor"])
    lines = [
        "# Monarch's names",
        "",
        f"Every public name of PyTorch Monarch {version}, and what there is of it here.",
        "Written by `make monarch ARGS=--page`; do not edit.",
        f"Of `monarch.actor` {there} of {len(rows['actor'])} names are here.",
        f"{equal} of {programs} programs give the same answer when only their import changes; the others come last.",
        f"So do all of {shapes} random expressions of extents, points, slices, shapes and values.",
        "",
    ]
    for module, each in rows.items():
        title = f"monarch.{module}" if module else "monarch"
        lines += [f"## {title}", "", "| name | here | |", "| --- | --- | --- |", *each, ""]
    lines += ["## Cut from names that are here", "", "| part | |", "| --- | --- |"]
    lines += [f"| `{part}` | {instead} |" for part, instead in PARTS.items()]
    lines += ["", "Programs of earlier pages that used these parts, or names that are cut, are gone with them.", ""]
    lines += ["## Programs whose answers differ", "", "| program | here |", "| --- | --- |"]
    lines += [f"| `{name}` | {why} |" for name, why in DIFFERENCES.items()]
    return "\n".join(lines) + "\n"


def row(name: str, members: list[str], ours: dict[str, list[str]]) -> str:
    """One line of a table."""
    if name not in ours:
        if name in CUT:
            return f"| `{name}` | cut | {CUT[name]} |"
        instead = INSTEAD.get(name, "")
        return f"| `{name}` | {'elsewhere' if instead.startswith(ELSEWHERE) else 'not here'} | {instead} |"
    missing = [each for each in members if each not in ours[name] and each not in ON_INSTANCES]
    better = BETTER.get(name, "")
    if not missing or name in OF_TYPES:
        return f"| `{name}` | {'better' if better else 'same'} | {better} |"
    without = "without " + ", ".join(f"`{each}`" for each in missing)
    return f"| `{name}` | same, in part | {'; '.join(filter(None, (without, better)))} |"


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
