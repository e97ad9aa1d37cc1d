"""Where a cursor stands, what may follow in our own lines, and completion in a terminal's IPython."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

import pytest
from IPython.core.completer import provisionalcompleter

from meshbook_extension.cells.run import MESH_CELL
from meshbook_extension.commands import COMMANDS, load_all
from meshbook_extension.completion.grammar import MagicLine, RankCode, follow, locate

CURSOR = "|"


def place(cell: str, *, auto: bool = False) -> RankCode | MagicLine | None:
    """What stands where ``cell`` has a bar."""
    cursor = cell.index(CURSOR)
    return locate(cell.replace(CURSOR, "", 1), cursor, auto=auto)


def test_the_body_of_a_mesh_cell_is_code_for_the_ranks_of_its_line() -> None:
    assert place("%%mesh gpus=0\nx = 1\nx.|") == RankCode("x = 1\nx.", 8, 14, " gpus=0")
    assert place("\n  %%mesh\n|") == RankCode("", 0, 10, "")
    assert place("%%meshes\nx|") is None
    assert place("%%time\nx|") is None
    assert place("x = '%%mesh'\nx|") is None


def test_our_own_lines_are_recognised_wherever_they_stand() -> None:
    assert place("%%mesh gp| --time\nx") == MagicLine(" gp", " --time", 6, is_cell=True)
    assert place("x = 1\n  %mesh pu|\ny") == MagicLine(" pu", "", 13, is_cell=False)
    assert place("%%time\n%mesh eval x|") == MagicLine(" eval x", "", 12, is_cell=False)
    assert place("%mes|h spawn") is None
    assert place("%%mesh|\nx") is None


def test_auto_mode_sends_the_cells_that_it_would_send() -> None:
    assert place("x.|", auto=True) == RankCode("x.", 2, 0, "")
    assert place("# a comment\nx.|", auto=True) == RankCode("# a comment\nx.", 14, 0, "")
    assert place("%%local\nx.|", auto=True) is None
    assert place("%%bash\nx.|", auto=True) is None
    assert place("x.|") is None


class Names:
    """A mesh of four ranks, and a name of each kind."""

    def sizes(self) -> Mapping[str, int]:
        return {"hosts": 2, "gpus": 2}

    def ranks(self) -> Sequence[int]:
        return range(4)

    def names(self, kind: str, prefix: str) -> Iterable[str]:
        kinds = {"SLICE": ["left"], "meshes": ["main"], "ID": ["1", "2"], "notebook": ["here"], "ranks": ["there"]}
        return kinds.get(kind, ())


def words(line: str) -> list[str]:
    """What may stand behind ``line``, in place of its last word."""
    load_all()
    magic, _, rest = line.partition(" ")
    name, _, arguments = rest.partition(" ")
    grammar, text = (MESH_CELL, rest) if magic == "%%mesh" else (COMMANDS[name][0], arguments)
    return [word.text for word in follow(grammar, text, Names()).words]


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ("%%mesh ", ["left", "hosts=", "gpus=", "rank="]),
        ("%%mesh gpus=0 ", ["left", "hosts=", "rank="]),
        ("%%mesh gpus=", ["0", "1", ":"]),
        ("%%mesh gpus=0:", ["0", "1", "2"]),
        ("%%mesh rank=0,", ["0", "1", "2", "3"]),
        ("%%mesh --group ", ["rank", "equal", "none"]),
        ("%%mesh --group=e", ["equal"]),
        ("%%mesh --no", ["--no-collective"]),
        ("%%mesh --out ", []),
        ("%mesh use ", ["main"]),
        ("%mesh wait ", ["1", "2"]),
        ("%mesh slice ", ["hosts=", "gpus=", "rank="]),
        ("%mesh push ", ["here", "hosts=", "gpus=", "rank="]),
        ("%mesh pull t", ["there"]),
        ("%mesh pull a --at ", ["left"]),
        ("%mesh scatter x ", ["here", "axis=", "dim=", "hosts=", "gpus=", "rank="]),
        ("%mesh scatter x axis=", ["hosts", "gpus"]),
        ("%mesh scatter x dim=", []),
        ("%mesh broadcast x --from ", ["rank=0", "rank=1", "rank=2", "rank=3"]),
        ("%mesh grow ", ["gpus=", "hosts="]),
        ("%mesh grow gpus=", []),
        ("%mesh spawn --device ", ["cpu", "cuda"]),
        ("%mesh spawn -- --", []),
        ("%mesh auto ", ["on", "off"]),
        ("%mesh eval --at ", ["left"]),
    ],
)
def test_words_follow_from_the_grammar(line: str, expected: list[str]) -> None:
    assert words(line) == expected


def test_new_axes_are_those_of_the_examples() -> None:
    assert {"gpus=", "hosts="} <= set(words("%mesh spawn "))


def test_an_expression_begins_behind_the_head_of_its_line() -> None:
    load_all()
    grammar = COMMANDS["eval"][0]
    assert follow(grammar, "mod", Names()).expression == 3
    assert follow(grammar, "gpus=0 model.w", Names()).expression == len("model.w")
    assert follow(grammar, "gpus=", Names()).expression is None
    assert follow(grammar, "--at le", Names()).expression is None
    assert [word.text for word in follow(grammar, "gp", Names()).words] == ["gpus="]


def test_every_command_can_be_completed_from_its_name_on() -> None:
    load_all()
    for name, (command, _) in COMMANDS.items():
        for example in command.examples:
            if not example.startswith("%mesh "):
                continue
            for end in range(len(f"%mesh {name} "), len(example) + 1):
                assert not [word for word in words(example[:end]) if word.isupper()], example[:end]


@pytest.mark.slow
def test_a_terminals_ipython_asks_the_ranks_too(notebook) -> None:
    def complete(cell: str) -> list[str]:
        with provisionalcompleter():
            return [found.text for found in notebook.shell.Completer.completions(cell, len(cell))]

    notebook.run("%%mesh\nonly_on_ranks = 1")
    assert complete("%%mesh rank=1\nonly_on") == ["only_on_ranks"]
    assert "only_on_ranks" not in complete("only_on")
    assert "spawn" in complete("%mesh sp")


def test_objects_of_the_api_are_completed_by_ipython(notebook) -> None:
    notebook.run("%mesh use main --out procs")
    with provisionalcompleter():
        found = [each.text.lstrip(".") for each in notebook.shell.Completer.completions("procs.", len("procs."))]
    assert {"run", "execute", "slice", "pull"} <= set(found)
    assert not [name for name in found if name.startswith("_") or not hasattr(notebook["procs"], name)]
