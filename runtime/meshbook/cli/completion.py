"""``meshbook completion``: scripts for shells, made of the parsers. Names of meshes are asked of ``meshbook list``.

A script of ours is shorter than a dependency: Tab completes a command, its options, and the name of a mesh.
"""

from __future__ import annotations

import argparse
import contextlib

from meshbook.cli import COMMANDS, Subparsers, load, parser_of, parsers_in
from meshbook.errors import MeshError

SHELLS = ("bash", "zsh", "fish")
USE = {
    "bash": 'eval "$(meshbook completion bash)"    in ~/.bashrc',
    "zsh": 'eval "$(meshbook completion zsh)"    in ~/.zshrc',
    "fish": "meshbook completion fish > ~/.config/fish/completions/meshbook.fish",
}

BASH = """_meshbook() {{
    local word="${{COMP_WORDS[COMP_CWORD]}}" words=""
    if [ "$COMP_CWORD" -eq 1 ]; then
        words="{commands}"
    else
        case "${{COMP_WORDS[1]}}" in
{cases}
        esac
    fi
    COMPREPLY=($(compgen -W "$words" -- "$word"))
}}
complete -F _meshbook meshbook"""
CASE = '            {name}) words="{words}" ;;'
NAMES = "$(meshbook list --names 2>/dev/null)"
ZSH = "autoload -U +X bashcompinit && bashcompinit\n"
FISH = "complete -c meshbook -f -n {condition} -a '{words}'"


def add_parser(subparsers: Subparsers) -> None:
    """Add the parser of the command."""
    about = "Print a script that has a shell complete by Tab. " + "; ".join(USE.values())
    parser = subparsers.add_parser("completion", description=about, allow_abbrev=False)
    parser.add_argument("shell", choices=SHELLS)


def main(args: argparse.Namespace) -> int:
    """Print the script."""
    words = {name: _words(name) for name in COMMANDS}
    if args.shell == "fish":
        print(FISH.format(condition="__fish_use_subcommand", words=" ".join(words)))
        for name, after in words.items():
            listed = " ".join(after).replace(NAMES, "(meshbook list --names 2>/dev/null)")
            print(FISH.format(condition=f"'__fish_seen_subcommand_from {name}'", words=listed))
        return 0
    cases = "\n".join(CASE.format(name=name, words=" ".join(after)) for name, after in words.items())
    print((ZSH if args.shell == "zsh" else "") + BASH.format(commands=" ".join(words), cases=cases))
    return 0


def _words(name: str) -> list[str]:
    """Return the words that may follow a command."""
    words: list[str] = []
    with contextlib.suppress(MeshError):  # its packages are not installed
        parser = parsers_in(parser_of(load(name)))[name]
        for action in parser._actions:
            if action.dest == "name":
                words.append(NAMES)
            words += action.choices or ()
            words += [option for option in action.option_strings if option.startswith("--")]
        for nested in parsers_in(parser).values():
            words += [option for action in nested._actions for option in action.option_strings if "--" in option]
    return list(dict.fromkeys(words))
