"""Random programs on mesh tensors beside plain torch: values and gradients, whatever is cut.

    python -m benchmarks.tensor_programs                         for a minute, on two ranks and on four in a square
    python -m benchmarks.tensor_programs --seconds 1800 --seed 7
    python -m benchmarks.tensor_programs --one 1234 --axes 2     the program of a seed, once more

A program (`tensor_program_lines`) runs on plain tensors, and on tensors of the same values that are cut at random, with
sizes that fit no number of ranks. What fails is made shorter, and printed; then the command ends with 1.
"""

from __future__ import annotations

import argparse
import itertools
import time
from collections.abc import Iterable, Iterator
from typing import NamedTuple

import torch

from benchmarks.tensor_program_lines import Program, write_program
from meshbook import errors, this_host
from meshbook.distributed import Mesh

MEANT = ("would spoil gradients", "writes what depends on values")
"""What is refused with these words is to be."""
REFUSALS = (errors.MeshError, RuntimeError, TypeError, IndexError, NotImplementedError, AttributeError, ValueError)


def difference(program: Program, mesh: Mesh) -> str:
    """What a mesh does otherwise than plain torch; empty where that is nothing. It is random where it says so alone."""
    wanted = program.run([leaf.make() for leaf in program.leaves])
    try:
        got = program.run([leaf.place(mesh) for leaf in program.leaves])
    except REFUSALS as why:
        if any(words in str(why) for words in MEANT):
            return ""
        if isinstance(why, errors.WorkerLost):
            mesh.heal()
        return f"refused: {type(why).__name__}: {str(why).splitlines()[0] if str(why) else ''}"
    if got.keys() != wanted.keys():
        return f"wrong: {sorted(got.keys() ^ wanted.keys())} is there on one side only"
    for name, value in wanted.items():
        if got[name].shape != value.shape or got[name].dtype != value.dtype:
            return f"wrong: {name} is {_kind(got[name])}, not {_kind(value)}"
        if not torch.allclose(got[name].double(), value.double(), rtol=1e-6, atol=1e-6, equal_nan=True):
            return f"wrong: {name}"
    return ""


def _kind(tensor: torch.Tensor) -> str:
    return f"{tensor.dtype} {tuple(tensor.shape)}"


def shorten(program: Program, mesh: Mesh) -> Program:
    """A program that differs in the same way, of which no line can be left out."""
    told = difference(program, mesh).partition(":")[0]
    at = len(program.lines) - 1
    while at >= 0:
        fewer = program._replace(lines=program.lines[:at] + program.lines[at + 1 :])
        try:
            fewer.run([leaf.make() for leaf in fewer.leaves])
        except Exception:  # it needs the line
            at -= 1
            continue
        if difference(fewer, mesh).partition(":")[0] == told:
            program = fewer
        at -= 1
    return program


class Finding(NamedTuple):
    """A program that a mesh does not do as plain torch does."""

    seed: int
    why: str
    program: Program

    def __str__(self) -> str:
        return f"seed {self.seed}: {self.why}\n{self.program}"


def try_programs(mesh: Mesh, seeds: Iterable[int]) -> Iterator[Finding | None]:
    """For the program of each seed what it is not done as, or None."""
    for seed in seeds:
        program = write_program(seed, len(mesh.axes))
        if why := difference(program, mesh):
            shorter = shorten(program, mesh)
            yield Finding(seed, difference(shorter, mesh) or why, shorter)
        else:
            yield None


def _seeds_for(seconds: float, first: int) -> Iterator[int]:
    end = time.monotonic() + seconds
    return itertools.takewhile(lambda _: time.monotonic() < end, itertools.count(first))


def main() -> None:
    parser = argparse.ArgumentParser(description="random programs on mesh tensors beside plain torch")
    parser.add_argument("--seconds", type=float, default=60)
    parser.add_argument("--seed", type=int, default=0, help="of the first program")
    parser.add_argument("--one", type=int, help="the seed of the one program to run")
    parser.add_argument("--axes", type=int, choices=(1, 2), nargs="*", default=(1, 2))
    arguments = parser.parse_args()
    wrong = 0
    for axes in arguments.axes:
        with this_host().spawn_procs(dict.fromkeys("xy"[:axes], 2), name="programs") as procs:
            if arguments.one is not None:
                program = write_program(arguments.one, axes)
                print(program, difference(program, Mesh(procs)) or "as plain torch does", sep="\n")
                continue
            tried, found = 0, 0
            seeds = _seeds_for(arguments.seconds / len(arguments.axes), arguments.seed)
            for finding in try_programs(Mesh(procs), seeds):
                tried += 1
                if finding is not None:
                    found += 1
                    print(finding, "", sep="\n", flush=True)
            print(f"{axes} axes: {tried} programs, {found} not as plain torch does")
            wrong += found
    raise SystemExit(bool(wrong))


if __name__ == "__main__":
    main()
