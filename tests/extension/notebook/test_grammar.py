"""The grammar of the magics: what is understood, and how a mistake is answered."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from meshbook.errors import UsageError
from meshbook_extension.notebook.grammar import Arguments, Grammar, Option, parse

GRAMMAR = Grammar(
    name="%mesh test",
    summary="A command for tests.",
    words="[NAME] [NAME]",
    pairs="AXIS=..",
    options=(
        Option("--all", "a switch"),
        Option("--timeout", "seconds", float, "S"),
        Option("--group", "how", str, choices=("rank", "equal", "none")),
        Option("--name", "a text", str, "N"),
        Option("-n", "a whole number", int, "N"),
    ),
    rest="ENGINE OPTIONS",
    examples=("%mesh test a", "%mesh test --timeout 30", "%mesh test gpus=0"),
)
BARE = Grammar(name="%mesh bare", summary="Takes nothing.", examples=("%mesh bare",))
TAIL = Grammar(
    name="%mesh eval",
    summary="An expression.",
    pairs="AXIS=..",
    options=(Option("--at", "a slice", str, "SLICE"),),
    tail="EXPR",
    examples=("%mesh eval x",),
)


def refusal(line: str, grammar: Grammar = GRAMMAR) -> str:
    with pytest.raises(UsageError) as caught:
        parse(grammar, line)
    return str(caught.value)


def test_words_pairs_and_options_may_stand_in_any_order() -> None:
    found = parse(GRAMMAR, "left --timeout 2.5 gpus=0:2 --all -n 5 right --group=rank")
    assert found.words == ("left", "right")
    assert found.pairs == {"gpus": "0:2"}
    assert found.number("--timeout") == 2.5
    assert found.whole("-n") == 5
    assert found.flag("--all")
    assert found.text("--group") == "rank"
    assert found.text("--name") is None and not found.flag("--help")


def test_what_follows_two_dashes_is_left_alone() -> None:
    found = parse(GRAMMAR, "a -- --partition a100 --help x=1")
    assert found.words == ("a",)
    assert found.rest == ("--partition", "a100", "--help", "x=1")


def test_values_are_taken_literally() -> None:
    assert parse(GRAMMAR, "--name __import__('os').getpid()").text("--name") == "__import__(os).getpid()"
    assert "takes seconds" in refusal("--timeout 2*3")


def test_quotes_keep_spaces_together() -> None:
    assert parse(GRAMMAR, "--name 'two words'").text("--name") == "two words"
    assert "a quote is not closed" in refusal("--name 'two words")


def test_an_option_with_a_typo_names_the_near_match_and_an_example_of_it() -> None:
    assert refusal("--tiemout 3").splitlines() == [
        'unknown option "--tiemout" of %mesh test. Did you mean "--timeout"?',
        "  for example: %mesh test --timeout 30",
        "  all of it:   %mesh test --help",
    ]


def test_an_option_that_is_like_no_other_shows_the_first_example() -> None:
    text = refusal("--zzzzzz")
    assert 'unknown option "--zzzzzz"' in text and "Did you mean" not in text and "%mesh test a" in text
    assert "It has no options." in refusal("--all", BARE)


@pytest.mark.parametrize(
    ("line", "problem"),
    [
        ("--timeout", "--timeout needs a value: --timeout S."),
        ("--timeout soon", '--timeout takes seconds, or a time like 90s or 5m, not "soon".'),
        ("--timeout -1", "--timeout takes a number of at least 0, not -1."),
        ("--timeout nan", '--timeout takes seconds, or a time like 90s or 5m, not "nan".'),
        ("-n 1.5", '-n takes a whole number, not "1.5".'),
        ("--group ranks", '--group takes rank, equal or none, not "ranks". Did you mean "rank"?'),
        ("--all=yes", "--all is a switch and takes no value."),
        ("gpus=0 gpus=1", "gpus is given twice: gpus=0 and gpus=1."),
        ("gpus=", "gpus= has no value; write it without spaces."),
        ("gpus = 0", "write gpus=0 without spaces around the equals sign."),
        ("gpus =0:2", "write gpus=0:2 without spaces around the equals sign."),
        ("= 0", "write axis=value without spaces around the equals sign."),
        ("-r 0", 'unknown option "-r" of %mesh test. Ranks are named without a dash: rank=0.'),
        ("a b timeout", '"timeout" is one word too many for %mesh test. Did you mean "--timeout"?'),
    ],
)
def test_each_mistake_is_answered_with_what_would_be_right(line: str, problem: str) -> None:
    first, *rest = refusal(line).splitlines()
    assert first == problem
    assert len(rest) == 2 and rest[0].startswith("  for example: %mesh test")


def test_a_command_without_axes_refuses_them() -> None:
    assert '%mesh bare takes no axis, but got "gpus=0".' in refusal("gpus=0", BARE)
    assert '%mesh bare takes nothing after "--".' in refusal("-- x", BARE)


def test_help_is_given_whatever_else_the_line_says() -> None:
    assert parse(GRAMMAR, "a b c d --nonsense --help").wants_help
    assert parse(GRAMMAR, "-h").wants_help
    assert parse(TAIL, "--help").wants_help


def test_help_shows_usage_options_and_examples() -> None:
    text = GRAMMAR.help()
    assert "  %mesh test [NAME] [NAME] AXIS=.. [OPTIONS] [-- ENGINE OPTIONS]\n" in text
    assert "  %mesh eval AXIS=.. [--at SLICE] EXPR\n" in TAIL.help()
    assert "--timeout S              seconds" in text
    assert text.index("Examples:") < text.index("%mesh test gpus=0")


@pytest.mark.parametrize(
    ("line", "pairs", "tail"),
    [
        ("x + 1", {}, "x + 1"),
        ("gpus=0 x + 1", {"gpus": "0"}, "x + 1"),
        ("rank == 0", {}, "rank == 0"),
        ("rank==0", {}, "rank==0"),
        ("{'a': 1}['a']  + 2", {}, "{'a': 1}['a']  + 2"),
        ("-x", {}, "-x"),
        ("-- gpus=0", {}, "gpus=0"),
        ("f(gpus=0)", {}, "f(gpus=0)"),
        ("x if y else 'it''s'", {}, "x if y else 'it''s'"),
    ],
)
def test_an_expression_is_taken_as_it_stands(line: str, pairs: dict[str, str], tail: str) -> None:
    found = parse(TAIL, line)
    assert (found.pairs, found.tail) == (pairs, tail)


def test_options_may_stand_before_an_expression() -> None:
    found = parse(TAIL, "--at left gpus=1 x.shape")
    assert (found.text("--at"), found.pairs, found.tail) == ("left", {"gpus": "1"}, "x.shape")
    assert "%mesh eval needs EXPR." in refusal("gpus=0", TAIL)
    assert 'Did you mean "--at"?' in refusal("--ta left x", TAIL)


@given(st.text(max_size=40))
def test_any_line_is_understood_or_refused(line: str) -> None:
    for grammar in (GRAMMAR, BARE, TAIL):
        try:
            assert isinstance(parse(grammar, line), Arguments)
        except UsageError as error:
            assert grammar.name in str(error)
