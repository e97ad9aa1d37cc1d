"""What the completer found, as replies of Jupyter's protocol.

A module of its own because a kernel that is busy with a cell answers as one that is not.
"""

from __future__ import annotations

from typing import Any

from meshbook_extension.completion.completer import Found

TYPES = "_jupyter_types_experimental"
"""Where front ends look for the kinds of completions."""


def complete_reply(found: Found | None, cursor: int) -> dict[str, Any]:
    """The content of a complete_reply; None: nothing was found at ``cursor``."""
    found = found or Found(cursor, cursor, [])
    kinds = [
        {"start": found.start, "end": found.end, "text": match.text, "type": match.kind, "signature": match.signature}
        for match in found.matches
    ]
    return {
        "status": "ok",
        "matches": [match.text for match in found.matches],
        "cursor_start": found.start,
        "cursor_end": found.end,
        "metadata": {TYPES: kinds},
    }


def inspect_reply(text: str) -> dict[str, Any]:
    """The content of an inspect_reply."""
    data = {"text/plain": text} if text else {}
    return {"status": "ok", "found": bool(text), "data": data, "metadata": {}}
