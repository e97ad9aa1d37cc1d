"""A hook of mkdocs and griffe: pages that are made of other files, links that lead out of docs/, and docstrings.

`make docs` uses it through mkdocs.yml. The site has the notebooks with their saved outputs, CONTRIBUTING.md and
CHANGELOG.md as pages. A link from docs/ to a file that is no page becomes the file's name, as on a package index.
"""

from __future__ import annotations

import base64
import json
import posixpath
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import griffe
from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

ROOT = Path(__file__).parents[2]
LOGO = ROOT / "kernel" / "meshbook_kernel" / "kernelspec" / "logo-svg.svg"
COPIED = {"contributing.md": "CONTRIBUTING.md", "changelog.md": "CHANGELOG.md"}
"""Pages of the site that lie outside of docs/."""
LINK = re.compile(r"(?<!!)\[([^\]]+)\]\((?!https?:|mailto:|#)([^)#\s]+)(#[^)\s]*)?\)")
FENCE_WORD = re.compile(r"^(```\w+) (?:cluster|fragment)$", re.MULTILINE)
"""The mark of a block that no test runs: it needs a cluster, or names of yours."""
OUTPUT = re.compile(r"^(`{3,})text$", re.MULTILINE)  # the fence of an output, which looks other than code
COLOUR = re.compile(r"\x1b\[[0-9;]*m")
LEGEND = re.compile(r"^([a-z_]\w*|Returns|Raises|Yields): ")
"""A line of a docstring about one argument, about the result, or about errors."""
PICTURES = {"image/png": "png", "image/svg+xml": "svg"}
"""The kinds of outputs that are shown as pictures, with the end of a file's name."""
LEGEND_ITEM = re.compile(r"^- ")


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add the pages that are made of files outside of docs/, and the logo."""
    for page, source in COPIED.items():
        files.append(File.generated(config, page, content=_moved((ROOT / source).read_text(), "..")))
    for notebook in sorted((ROOT / "notebooks").glob("*.ipynb")):
        for name, content in notebook_files(notebook):
            files.append(File.generated(config, f"notebooks/{name}", content=content))
    files.append(File.generated(config, "pictures/logo.svg", content=LOGO.read_bytes()))
    return files


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Mend the links that lead out of docs/, and take marks for tests from fences."""
    folder = posixpath.dirname(page.file.src_uri)
    mended = LINK.sub(lambda found: _link(found, folder, files), markdown)
    return OUTPUT.sub(r"\1{.text .output}", FENCE_WORD.sub(r"\1", mended))


def _moved(text: str, up: str) -> str:
    """Return a text of the repository's root as a page of docs/."""
    return LINK.sub(lambda found: f"[{found[1]}]({posixpath.join(up, found[2])}{found[3] or ''})", text)


def _link(found: re.Match[str], folder: str, files: Files) -> str:
    text, target, anchor = found[1], found[2], found[3] or ""
    at = posixpath.normpath(posixpath.join("docs", folder, target))
    copied = {source: page for page, source in COPIED.items()}
    page = copied.get(at, at.replace(".ipynb", ".md").removeprefix("docs/"))
    if files.get_file_from_path(page) is None and not at.startswith("docs/") and (ROOT / at).exists():
        return f"`{at}`" if posixpath.basename(at) in text else f"{text} (`{at}`)"
    return f"[{text}]({posixpath.relpath(page, folder or '.')}{anchor})"


def notebook_files(path: Path) -> Iterator[tuple[str, str | bytes]]:
    """Yield a notebook's page with its saved outputs, and the pictures that the page shows."""
    notebook = json.loads(path.read_text())
    pictures: list[tuple[str, bytes]] = []
    parts = [f"*The notebook `notebooks/{path.name}`, with its saved outputs.*"]
    for cell in notebook["cells"]:
        source = "".join(cell["source"]).strip()
        if cell["cell_type"] == "markdown":
            parts.append(source.replace("](../docs/", "](../"))
        elif source:
            parts.append(f"````python\n{source}\n````")
            for output in cell["outputs"]:
                data = output.get("data", {})
                kind = next((kind for kind in PICTURES if kind in data), None)
                if kind is not None:
                    name = f"{path.stem}-{len(pictures)}.{PICTURES[kind]}"
                    text = "".join(data[kind])
                    pictures.append((name, base64.b64decode(text) if kind == "image/png" else text.encode()))
                    parts.append(f"![output of the cell above]({name})")
                elif text := _text_of(output):
                    parts.append(f"````text\n{text}\n````")
    title = next(part for part in parts if part.startswith("# "))
    parts.remove(title)
    heading, _, rest = title.partition("\n")
    yield f"{path.stem}.md", "\n\n".join([heading, *parts[:1], rest, *parts[1:]]) + "\n"
    yield from pictures


def _text_of(output: dict[str, Any]) -> str:
    if output["output_type"] == "error":
        lines: list[str] = output["traceback"]
        return COLOUR.sub("", "\n".join(lines)).rstrip()
    text = output.get("text") or output.get("data", {}).get("text/plain", "")
    return COLOUR.sub("", "".join(text)).rstrip()


class Legends(griffe.Extension):
    """Makes a list of the lines of a docstring that begin with an argument, ``Returns:`` or ``Raises:``."""

    def on_instance(self, *, obj: griffe.Object, **kwargs: Any) -> None:
        """Rewrite the docstring of one object."""
        if obj.docstring is not None and (obj.is_function or obj.is_class):
            obj.docstring.value = as_list(obj.docstring.value)


def as_list(docstring: str) -> str:
    """Return a docstring in which each line about an argument, a result or an error is an item of a list."""
    lines: list[str] = []
    for line in docstring.splitlines():
        if found := LEGEND.match(line):
            if lines and lines[-1].strip() and not LEGEND_ITEM.match(lines[-1]):
                lines.append("")
            name = f"*{found[1]}*" if found[1][0].isupper() else f"`{found[1]}`"
            lines.append(f"- {name}: {line[found.end() :]}")
        else:
            lines.append(line)
    return "\n".join(lines)
