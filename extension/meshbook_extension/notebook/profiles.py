"""Profiles: lines of ``%mesh spawn`` that a project has written down, under a name.

meshbook.toml                        pyproject.toml
    [spawn]                              [tool.meshbook.spawn]
    gpu = "hosts=4 gpus=8 --on slurm"    gpu = "hosts=4 gpus=8 --on slurm"
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

from meshbook.errors import UsageError
from meshbook.formatting import did_you_mean
from meshbook_extension.notebook.grammar import Arguments, parse

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

_FILES = {"meshbook.toml": (), "pyproject.toml": ("tool", "meshbook")}
"""Each with the way to the table that is ours."""


class Profiles(NamedTuple):
    """The profiles of one file."""

    path: Path | None
    """None: there is no such file."""
    lines: Mapping[str, str]


def find_profiles(folder: Path) -> Profiles:
    """Those of the nearest file that has some, in ``folder`` or above it. Raises: UsageError if it makes no sense."""
    for place in (folder, *folder.parents):
        for name, way in _FILES.items():
            table = _read(place / name)
            for key in (*way, "spawn"):
                table = table.get(key, {}) if isinstance(table, dict) else {}
            if table:
                return Profiles(place / name, _checked(table, place / name))
    return Profiles(None, {})


def with_profile(arguments: Arguments) -> Arguments:
    """The arguments with those of the profile that they name; what the line itself says counts.

    Raises: UsageError.
    """
    if not arguments.profile:
        return arguments
    found = find_profiles(Path.cwd())
    line = found.lines.get(arguments.profile)
    if line is None:
        there = f"{found.path} has {', '.join(found.lines)}" if found.path else "No file here has any"
        near = did_you_mean(arguments.profile, found.lines)
        raise UsageError(
            f'there is no profile "{arguments.profile}".{near} {there}.\n'
            '  write it in meshbook.toml, here or above, below [spawn]: gpu-cluster = "hosts=2 gpus=4 --on ..."'
        )
    try:
        written = parse(arguments.grammar, line)
        if written.profile or written.words or written.wants_help:
            raise UsageError("a profile has axes, options, and what follows --")
    except UsageError as error:
        raise UsageError(f'profile "{arguments.profile}" of {found.path}: {error}') from None
    return replace(
        arguments,
        pairs={**written.pairs, **arguments.pairs},
        options={**written.options, **arguments.options},
        rest=arguments.rest or written.rest,
    )


def _read(path: Path) -> object:
    """Raises: UsageError."""
    try:
        return tomllib.loads(path.read_text())
    except (FileNotFoundError, NotADirectoryError):
        return {}
    except (OSError, ValueError) as error:
        raise UsageError(f"{path} cannot be read for profiles: {error}") from None


def _checked(table: object, path: Path) -> dict[str, str]:
    if not isinstance(table, dict) or not all(isinstance(line, str) for line in table.values()):
        raise UsageError(
            f"{path}: each profile below [spawn] is a line, as in\n"
            '  gpu-cluster = "hosts=4 gpus=8 --on ssh:nodeA,nodeB"'
        )
    return table
