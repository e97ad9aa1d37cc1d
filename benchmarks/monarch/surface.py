"""The public names of a package, and of its classes, as JSON.

Run with the package's name by the interpreter that has it; imports nothing of ours, so Monarch's environment can do it.
"""

from __future__ import annotations

import importlib
import inspect
import json
import sys

MODULES = ("actor", "rdma", "spmd", "job", "config", "")
"""Those of which programs import; the last is the package itself."""


def names_of(module: object) -> list[str]:
    """What a module exports: by ``__all__`` where it has one."""
    listed = getattr(module, "__all__", None)
    names = list(listed) if listed is not None else [name for name in dir(module) if not name.startswith("_")]
    return sorted(name for name in names if not name.startswith("_"))


def members_of(value: object) -> list[str]:
    """The public attributes of a class; those of an enumeration too that its ``dir`` leaves out, its methods."""
    if not inspect.isclass(value):
        return []
    names = set(dir(value)).union(*(vars(each) for each in value.__mro__))
    return sorted(name for name in names if not name.startswith("_"))


def surface(package: str) -> dict[str, dict[str, list[str]]]:
    """Module to name to members; modules that are not there are left out."""
    found: dict[str, dict[str, list[str]]] = {}
    for name in MODULES:
        path = f"{package}.{name}" if name else package
        if package == "meshbook" and name:
            path = "meshbook.monarch" if name == "actor" else f"meshbook.monarch.{name}"
        try:
            module = importlib.import_module(path)
        except ModuleNotFoundError:
            continue
        found[name] = {}
        for each in names_of(module):
            try:
                value = getattr(module, each)
            except Exception:  # it wants a GPU, or a package that is not there
                value = None
            if inspect.ismodule(value) or getattr(value, "__module__", "").startswith("typing"):
                continue
            found[name][each] = members_of(value)
    return found


if __name__ == "__main__":
    print(json.dumps(surface(sys.argv[1])))
