"""How the subjects of commits are written; ``make check`` runs it on those that are new.

    python tests/support/check_commits.py [RANGE]

New are the commits since the last tag, or, where there is none, those that origin/main does not have. Where neither can
be told, as in a fresh clone of main, there is nothing to look at, and that is said.
"""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[2]
LONGEST = 72
UNFINISHED = re.compile(r"(fixup|squash|amend)!|wip\b", re.IGNORECASE)
PAST = re.compile(
    r"(Added|Allowed|Changed|Cleaned|Corrected|Created|Deleted|Extended|Fixed|Implemented|Improved|Introduced|Made|Moved|"
    r"Reduced|Refactored|Removed|Renamed|Replaced|Reverted|Simplified|Updated|Used|Wrote)\b"
)
"""At the beginning: what somebody did, where the subject is to say what the commit does or what is true now."""


def new_commits(folder: Path) -> tuple[str, str]:
    """The range of the commits to look at, empty if there is none, and why these."""
    if tag := _git(folder, "describe", "--tags", "--abbrev=0"):
        return f"{tag}..HEAD", f"since the tag {tag}"
    for main in ("origin/main", "main"):
        if base := _git(folder, "merge-base", "HEAD", main):
            if base != _git(folder, "rev-parse", "HEAD"):
                return f"{base}..HEAD", f"that {main} does not have"
            return "", f"there is no tag, and {main} has them all"
    return "", "there is no tag, no main, or no git"


def _git(folder: Path, *arguments: str) -> str:
    """What git prints; empty if it fails, which is how it says that there is no such thing."""
    try:
        done = subprocess.run(["git", "-C", str(folder), *arguments], capture_output=True, text=True, timeout=60)
    except FileNotFoundError:
        return ""
    return done.stdout.strip() if done.returncode == 0 else ""


def faults_of(subject: str) -> Iterator[str]:
    """What is wrong with a subject."""
    if len(subject) > LONGEST:
        yield f"it has {len(subject)} characters, at most {LONGEST} fit: the rest goes into the body"
    if UNFINISHED.match(subject):
        yield "it is unfinished: squash it, or say what it does"
    elif not subject[:1].isupper() and not subject[:1].isdigit() and not re.match(r"\S*[._/%-]", subject):
        yield "it begins with a small letter"
    if subject.endswith("."):
        yield "it ends with a full stop"
    if past := PAST.match(subject):
        yield f"{past[0]!r} tells of the past: say what the commit does or what is true now"


def main(arguments: list[str], folder: Path = ROOT) -> int:
    """Print what is wrong; returns the exit code."""
    commits, why = (arguments[0], arguments[0]) if arguments else new_commits(folder)
    if not commits:
        print(f"No new commits to look at: {why}.")
        return 0
    command = ["git", "-C", str(folder), "log", "--no-merges", "--format=%h %s", commits]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    if done.returncode:
        print(f"git knows no commits {commits}: {done.stderr.strip()}")
        return 2
    lines = [line.partition(" ") for line in done.stdout.splitlines()]
    wrong = [f"{commit} {subject!r}: {fault}" for commit, _, subject in lines for fault in faults_of(subject)]
    wrong += ["Mend them with git rebase -i; CONTRIBUTING.md says how subjects are written."] * bool(wrong)
    print("\n".join(wrong) or f"Subjects of commits are in order: {len(lines)} {why}.")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
