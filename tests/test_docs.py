"""The pages as files: fences are closed, links and anchors lead somewhere. `make docs` looks at their site."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PAGES = sorted([*ROOT.glob("docs/**/*.md"), *ROOT.glob("*.md")])
FENCE = re.compile(r"^ *(`{3,}|~{3,})(.*)$")
LINK = re.compile(r"\]\((?!https?:|mailto:)([^)\s]*)\)")
SEAMS = re.compile(r"\W*\.\.\.\W*|: |, | ranks?\b| may be |(?<=process)| \(")
"""The lines at which code puts the text of an error together."""
HEADING = re.compile(r"^#+ (.+)$")


def outside_of_fences(text: str) -> Iterator[str]:
    """Yield the lines of a page that are no code. Raises: AssertionError for a fence that is never closed."""
    fence, begun = "", 0
    for number, line in enumerate(text.splitlines(), 1):
        found = FENCE.match(line)
        if fence:
            if found and found[1].startswith(fence) and not found[2].strip():
                fence = ""
        elif found:
            fence, begun = found[1], number
        else:
            yield line
    assert not fence, f"the fence of line {begun} is never closed"


def anchors(text: str) -> set[str]:
    """Return the anchors of a page, as the site and a repository make them of its headings."""
    heads = [found[1] for line in outside_of_fences(text) if (found := HEADING.match(line))]
    slugs = {re.sub(r"[^\w -]", "", head.lower()).strip().replace(" ", "-") for head in heads}
    return slugs | set(re.findall(r'<a id="([^"]+)">', text))


def dead_links(page: Path) -> Iterator[str]:
    """Yield the links of a page that lead to no file, or to no heading of a page."""
    for line in outside_of_fences(page.read_text()):
        for target in LINK.findall(re.sub(r"`[^`]*`", "", line)):
            path, _, anchor = target.partition("#")
            file = (page.parent / path).resolve() if path else page
            if not file.exists() or (anchor and file.suffix == ".md" and anchor not in anchors(file.read_text())):
                yield target


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_each_link_leads_somewhere(page: Path) -> None:
    assert list(dead_links(page)) == []


@pytest.mark.parametrize(
    ("text", "dead"),
    [
        ("# A b\n[x](#a-b) [y](page.md#a-b) [z](https://example.org)\n", []),
        ("# A\n[x](#b)\n[y](other.md)\n```\n[z](#c)\n```\n", ["#b", "other.md"]),
    ],
)
def test_a_dead_link_is_found(text: str, dead: list[str], tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text(text)
    assert list(dead_links(page)) == dead


def test_a_fence_that_is_never_closed_is_found() -> None:
    with pytest.raises(AssertionError, match="line 3"):
        list(outside_of_fences("```\n```\n```python\ntext\n"))


def texts_of_code() -> str:
    """Return every string of the three packages, one a line, with three dots for what is filled in."""
    found = []
    for path in (path for folder in ("runtime", "extension", "kernel") for path in (ROOT / folder).rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            match node:
                case ast.JoinedStr(values=values):
                    parts = [part.value if isinstance(part, ast.Constant) else "..." for part in values]
                    found.append("".join(map(str, parts)))
                case ast.Constant(value=str() as text):
                    found.append(text)
    return "\n".join(found)


def test_each_error_of_the_index_is_one_of_the_code() -> None:
    rows = re.findall(r"^\| (`.*?`)[^|`]*\|", (ROOT / "docs" / "errors.md").read_text(), re.MULTILINE)
    code = texts_of_code()
    assert len(rows) > 50
    for text in re.findall(r"`([^`]+)`", " ".join(rows)):
        pieces = re.split(SEAMS, text)
        assert any(len(piece) >= 6 and piece in code for piece in pieces), text
