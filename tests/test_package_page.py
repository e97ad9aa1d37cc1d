"""What a package index shows of the README: no picture, and no link that leads nowhere there."""

from __future__ import annotations

import email
import re
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

import pytest
import tomllib

ROOT = Path(__file__).parents[1]
ELSEWHERE = ("Failed to fetch", "dns error", "error sending request", "Connection")
"""The words of uv where the network is missing."""
DEAD = re.compile(
    r"\]\((?!https?:)|^\s*\[[^\]]+\]:\s*(?!https?:)|(?:href|src|srcset)=(?![\"']?https?:)|<picture", re.MULTILINE
)
"""A link or a picture of a file that only the repository has."""


def assert_stands_alone(page: str) -> None:
    assert page.lstrip().startswith("# Meshbook") and "docs/magics.md" in page and len(page) > 3000
    assert DEAD.findall(page) == []


def test_rules_of_pyproject_leave_no_dead_link() -> None:
    hooks = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["hatch"]["metadata"]["hooks"]
    page = (ROOT / "README.md").read_text()
    assert len(DEAD.findall(page)) > 20
    for rule in hooks["fancy-pypi-readme"]["substitutions"]:
        page = re.sub(rule["pattern"], rule["replacement"], page)
    assert_stands_alone(page)


def test_each_picture_of_the_readme_is_there_and_small() -> None:
    pictures = re.findall(r'(?:src|srcset)="([^"]+)"', (ROOT / "README.md").read_text())
    assert len(pictures) >= 4 and len(pictures) % 2 == 0
    for picture in pictures:
        assert 1_000 < (ROOT / picture).stat().st_size <= 100_000, picture


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_built_packages_have_no_dead_link(tmp_path: Path) -> None:
    build = [sys.executable, "-m", "uv", "build", "--wheel", "--sdist", "--out-dir", str(tmp_path), str(ROOT)]
    built = subprocess.run(build, capture_output=True, text=True, timeout=500)
    if built.returncode and any(words in built.stderr for words in ELSEWHERE):
        pytest.skip("what builds packages cannot be downloaded here")
    assert built.returncode == 0, built.stderr
    (wheel,), (source,) = tmp_path.glob("*.whl"), tmp_path.glob("*.tar.gz")
    with zipfile.ZipFile(wheel) as files:
        (name,) = (name for name in files.namelist() if name.endswith(".dist-info/METADATA"))
        metadata = [files.read(name).decode()]
    with tarfile.open(source) as files:
        (member,) = (member for member in files if member.name.count("/") == 1 and member.name.endswith("/PKG-INFO"))
        extracted = files.extractfile(member)
        assert extracted is not None
        metadata.append(extracted.read().decode())
    for text in metadata:
        parsed = email.message_from_string(text)
        assert parsed["Description-Content-Type"] == "text/markdown"
        assert_stands_alone(parsed.get_payload())
