"""The grammar of the magics: words, ``axis=value`` pairs and typed options, all taken literally.

A line is split as a shell would split it. Each command has a `Grammar`, from which both the parser and the help text
are made, so that they cannot disagree. Nothing is evaluated: ``--timeout 2*3`` is an error, not 6.

    %mesh spawn hosts=2 gpus=4 --on slurm -- --partition a100
          |     |               |            |
          name  pairs           option       rest
"""

from __future__ import annotations

import keyword
import re
import shlex
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import TypeAlias

from meshbook.errors import UsageError
from meshbook.formatting import did_you_mean
from meshbook_extension.output.labels import parse_duration

PAIR = re.compile(r"([^\W\d]\w*)=(?!=)(.*)", re.DOTALL)
"""A pair ``axis=value``; ``rank==0`` is an expression, not a pair."""

_OPTION = re.compile(r"--[a-z][a-z-]*(=.*)?")
_NUMBER = re.compile(r"-\d+(\.\d*)?")

OptionValue: TypeAlias = bool | str | int | float


def check_identifier(name: str, where: str) -> str:
    """Return ``name`` if it can name a variable. Raises: UsageError."""
    if not name.isidentifier() or keyword.iskeyword(name):
        raise UsageError(f'{where}: "{name}" cannot be the name of a variable.')
    return name


@dataclass(frozen=True)
class Option:
    """An option of a command, with the text that its help shows.

    value: the type of its value: bool (a switch, takes none), str, int or float.
    metavar: how the help writes the value: S is seconds or a time with a unit, TIME has a unit, VAR names a variable.
    choices: the only values allowed.
    """

    name: str
    help: str
    value: type = bool
    metavar: str = ""
    choices: tuple[str, ...] = ()

    @property
    def usage(self) -> str:
        """The option as help writes it: ``--timeout S``, ``--group rank|equal|none``."""
        return " ".join(filter(None, [self.name, "|".join(self.choices) or self.metavar]))

    def convert(self, text: str) -> OptionValue:
        """Return the value that ``text`` stands for. Raises: UsageError, or ValueError that describes a valid value."""
        if self.choices and text not in self.choices:
            either = " or ".join(filter(None, [", ".join(self.choices[:-1]), self.choices[-1]]))
            raise ValueError(f'takes {either}, not "{text}".{did_you_mean(text, self.choices)}')
        if self.metavar == "TIME":
            return parse_duration(text, self.name)
        if self.value is str:
            return check_identifier(text, self.name) if self.metavar == "VAR" else text
        takes_time = self.metavar == "S"
        try:
            if takes_time and text[-1:].isalpha():
                return parse_duration(text, self.name)
            number = int(text) if self.value is int else float(text)
        except ValueError:
            kind = "seconds, or a time like 90s or 5m" if takes_time else "a number"
            raise ValueError(f'takes {"a whole number" if self.value is int else kind}, not "{text}".') from None
        if number < 0 or number != number:
            raise ValueError(f"takes a number of at least 0, not {text}.")
        return number


@dataclass(frozen=True)
class Grammar:
    """The arguments that one command accepts.

    name: as typed, ``%mesh spawn`` or ``%%mesh``.
    words: how the help writes the plain words: ``NAME``, ``[NAME]`` for one that may be left out, ``NAME [NAME ...]``.
    names: the kind of thing that ``NAME`` names, for completion: ``meshes``, ``waiting`` (to be attached), ``notebook``
    or ``ranks`` (variables there); empty: something new.
    pairs: how it writes ``axis=value`` pairs; empty where there are none.
    tail: the first plain word begins a text that is taken raw to the end of the line (an expression).
    rest: the words after ``--`` belong to another program.
    profiles: ``@NAME`` stands for a line that was written down (`meshbook_extension.commands.spawn`).
    """

    name: str
    summary: str
    examples: tuple[str, ...]
    words: str = ""
    pairs: str = ""
    options: tuple[Option, ...] = ()
    tail: str = ""
    rest: str = ""
    notes: str = ""
    names: str = ""
    profiles: bool = False

    @property
    def limits(self) -> tuple[int, int | None]:
        """The least and the most plain words; None for any number."""
        parts = re.findall(r"\[[^]]*\]|\S+", self.words)
        least = sum(not part.startswith("[") for part in parts)
        return least, None if self.words.endswith("...]") else len(parts)

    @property
    def _known(self) -> dict[str, Option]:
        return {option.name: option for option in self.options}

    @property
    def usage(self) -> str:
        """The command's form in one line."""
        options = [f"[{option.usage}]" for option in self.options] if len(self.options) < 4 else ["[OPTIONS]"]
        parts = [
            self.name,
            "[@PROFILE]" if self.profiles else "",
            self.words,
            self.pairs,
            *options,
            self.tail,
            self.rest and f"[-- {self.rest}]",
        ]
        return " ".join(filter(None, parts))

    def help(self) -> str:
        """Return the text that ``--help`` and ``?`` show."""
        lines = [self.summary, "", f"  {self.usage}"]
        if self.options:
            width = max(len(option.usage) for option in self.options)
            lines += ["", *(f"  {option.usage:{width}}  {option.help}" for option in self.options)]
        if self.notes:
            lines += ["", self.notes.strip("\n")]
        lines += ["", "Examples:", *(f"  {example}" for example in self.examples)]
        return "\n".join(lines)

    def refuse(self, problem: str, near: str = "") -> UsageError:
        """Return the error for a wrong line: the problem, an example (one that shows ``near``), and the way to help."""
        with_near = [example for example in self.examples if near and near in example]
        example = (with_near or list(self.examples))[0]
        return UsageError(f"{problem}\n  for example: {example}\n  all of it:   {self.name} --help")

    # ---- reading, from left to right -------------------------------------------------------------------------

    def read(self, parts: list[str]) -> Arguments:
        """Return the arguments in the parts of a line. Raises: UsageError."""
        before_rest = parts[: parts.index("--")] if "--" in parts else parts
        if "--help" in before_rest or "-h" in before_rest:
            return Arguments(self, options={"--help": True})
        words: list[str] = []
        pairs: dict[str, str] = {}
        options: dict[str, OptionValue] = {}
        rest: list[str] = []
        profile = ""
        following = iter(parts)
        for part in following:
            pair = PAIR.fullmatch(part)
            if part == "--":
                rest = list(following)
                if not self.rest:
                    raise self.refuse(f'{self.name} takes nothing after "--".')
            elif part.startswith("-") and not _NUMBER.fullmatch(part):
                option, value = self._option(part, following)
                options[option.name] = value
            elif pair:
                self._pair(pair[1], pair[2], pairs)
            elif part.startswith("@") and self.profiles:
                if profile:
                    raise self.refuse(f"one profile at a time, but got @{profile} and {part}.", "@")
                profile = part[1:] or part
            else:
                words.append(part)
        self._count(words, pairs, options)
        return Arguments(self, tuple(words), pairs, options, rest=tuple(rest), profile=profile)

    def _option(self, part: str, parts: Iterable[str]) -> tuple[Option, OptionValue]:
        name, equals, value = part.partition("=")
        option = self._known.get(name)
        if option is None:
            raise self._unknown(name)
        if option.value is bool:
            if equals:
                raise self.refuse(f"{name} is a switch and takes no value.", name)
            return option, True
        if not equals:
            value = next(iter(parts), "")
        if not value:
            raise self.refuse(f"{name} needs a value: {option.usage}.", name)
        try:
            return option, option.convert(value)
        except UsageError:
            raise
        except ValueError as error:
            raise self.refuse(f"{name} {error}", name) from None

    def _unknown(self, name: str) -> UsageError:
        problem = f'unknown option "{name}" of {self.name}.'
        if self.pairs and name.lstrip("-") in ("r", "rank", "ranks", "t", "target", "targets"):
            return self.refuse(f"{problem} Ranks are named without a dash: rank=0.", "rank=")
        suggestion = did_you_mean(name, self._known)
        near = suggestion.split('"')[1] if suggestion else ""
        problem += suggestion
        if not suggestion and not self._known:
            problem += " It has no options."
        return self.refuse(problem, near)

    def _pair(self, axis: str, value: str, pairs: dict[str, str]) -> None:
        if not self.pairs:
            raise self.refuse(f'{self.name} takes no axis, but got "{axis}={value}".')
        if axis in pairs:
            raise self.refuse(f"{axis} is given twice: {axis}={pairs[axis]} and {axis}={value}.")
        if not value:
            raise self.refuse(f"{axis}= has no value; write it without spaces.", f"{axis}=")
        pairs[axis] = value

    def _count(self, words: list[str], pairs: Mapping[str, str], options: Mapping[str, OptionValue]) -> None:
        least, most = self.limits
        if words and (cut := next((each for each in options.values() if str(each).endswith(",")), None)):
            raise self.refuse(f"write {cut}{words[0]} without a space after the comma.")
        if any(word.startswith("=") for word in words):
            found = re.search(r"(\S+) = ?(\S+)", " ".join(words))
            axis, value = found.groups() if found else ("axis", "value")
            raise self.refuse(f"write {axis}={value} without spaces around the equals sign.", f"{axis}=")
        if len(words) < least:
            axis, value = next(iter(pairs.items()), ("", ""))
            more = f"; {axis}={value} chooses ranks and assigns nothing" if axis else ""
            raise self.refuse(f"{self.name} needs {self.words}{more}.")
        if most is not None and len(words) > most:
            extra = words[most]
            meant = [option for option in self._known if option.lstrip("-") == extra]
            hint = f' Did you mean "{meant[0]}"?' if meant else ""
            if not meant and most == 0 and "AXIS=N" in self.pairs:
                raise self.refuse(f'"{extra}" has no size; write it as {extra}=4.')
            raise self.refuse(f'"{extra}" is one word too many for {self.name}.{hint}')


@dataclass(frozen=True)
class Arguments:
    """The arguments of a line, read by its grammar. Getters are typed and give None for a missing argument."""

    grammar: Grammar
    words: tuple[str, ...] = ()
    pairs: Mapping[str, str] = field(default_factory=dict)
    options: Mapping[str, OptionValue] = field(default_factory=dict)
    tail: str = ""
    rest: tuple[str, ...] = ()
    profile: str = ""

    def flag(self, name: str) -> bool:
        """Whether the switch ``name`` was given."""
        return bool(self.options.get(name, False))

    def text(self, name: str) -> str | None:
        """Return the value of a text option."""
        value = self.options.get(name)
        return None if value is None else str(value)

    def number(self, name: str) -> float | None:
        """Return the value of a numeric option."""
        value = self.options.get(name)
        return None if value is None else float(value)

    def whole(self, name: str) -> int | None:
        """Return the value of an option that takes a whole number."""
        value = self.options.get(name)
        return None if value is None else int(value)

    @property
    def wants_help(self) -> bool:
        """Whether ``--help`` was given; the rest of the line is not read then."""
        return self.flag("--help")


def parse(grammar: Grammar, line: str) -> Arguments:
    """Read ``line`` as ``grammar`` says.

    Raises: UsageError with the wrong word, a near match, and an example.
    """
    if grammar.tail:  # options and pairs first; the expression begins at the first part that is neither
        head, rest = _split_tail(grammar, line.strip())
        arguments = grammar.read(head)
        if not rest and not arguments.wants_help:
            raise grammar.refuse(f"{grammar.name} needs {grammar.tail}.")
        return replace(arguments, tail=rest)
    try:
        parts = shlex.split(line)
    except ValueError:
        raise grammar.refuse(f"a quote is not closed in: {line}") from None
    return grammar.read(parts)


def expression_start(grammar: Grammar, line: str) -> int | None:
    """Return where the expression of a command with a tail begins; None while options before it are being typed."""
    head, rest = _split_tail(grammar, line.lstrip())
    is_in_head = not rest and (head[-1:] == [""] or line[-1:].strip())
    return None if is_in_head or not grammar.tail else len(line) - len(rest)


def _split_tail(grammar: Grammar, rest: str) -> tuple[list[str], str]:
    head: list[str] = []
    takes_value = {option.name: option.value is not bool for option in grammar.options}
    while rest:
        part, _, after = rest.partition(" ")
        if part == "--":
            rest = after.lstrip()
            break
        if not (part in takes_value or part in ("--help", "-h") or _OPTION.fullmatch(part) or PAIR.fullmatch(part)):
            break
        head.append(part)
        rest = after.lstrip()
        if takes_value.get(part):
            value, _, after = rest.partition(" ")
            head.append(value)
            rest = after.lstrip()
    return head, rest
