"""Random programs on mesh tensors beside plain torch: values and gradients, whatever is cut.

    python -m benchmarks.tensor_programs                         for a minute, on two ranks and on four in a square
    python -m benchmarks.tensor_programs --seconds 1800 --seed 7
    python -m benchmarks.tensor_programs --one 1234 --axes 2     the program of a seed, once more
    python -m benchmarks.tensor_programs --repeated              each as a step that the ranks repeat, with other values

A program (`tensor_program_lines`) runs on plain tensors, and on tensors of the same values that are cut at random, with
sizes that fit no number of ranks. What fails is made shorter, and printed; then the command ends with 1.
"""

from __future__ import annotations

import argparse
import itertools
import time
import warnings
from collections.abc import Iterable, Iterator
from typing import NamedTuple

import torch

import meshbook
from benchmarks.tensor_program_lines import Program, write_program
from meshbook import errors, this_host
from meshbook.distributed import Mesh

MEANT = ("would spoil gradients", "writes what depends on values")  # what is refused with these words is to be
REPEATED = 8  # so often a program is done as a step: as it is, as always by the ranks, and as they have planned it
REFUSALS = (errors.MeshError, RuntimeError, TypeError, IndexError, NotImplementedError, AttributeError, ValueError)


def difference(program: Program, mesh: Mesh, *, repeated: bool = False) -> str:
    """What a mesh does otherwise than plain torch; empty where that is nothing. It is random where it says so alone."""
    try:
        if not repeated:
            wanted = program.run([leaf.make() for leaf in program.leaves])
            return _unlike(program.run([leaf.place(mesh) for leaf in program.leaves]), wanted)
        return _difference_as_a_step(program, mesh)
    except REFUSALS as why:
        if any(words in str(why) for words in MEANT):
            return ""
        if isinstance(why, errors.WorkerLost):
            mesh.heal()
        return f"refused: {type(why).__name__}: {str(why).splitlines()[0] if str(why) else ''}"


def _difference_as_a_step(program: Program, mesh: Mesh) -> str:
    def step(*given: torch.Tensor) -> dict[str, torch.Tensor]:
        leaves = [each.detach().requires_grad_(leaf.graded) for each, leaf in zip(given, program.leaves, strict=True)]
        return {name: value.detach() for name, value in program.results(leaves).items()}

    compiled = meshbook.compile(step)
    for time_ in range(REPEATED):
        try:
            wanted = program.run([leaf.make(time_) for leaf in program.leaves])
        except RuntimeError:  # plain torch does it with the first values alone
            break
        got = compiled(*[leaf.place(mesh, time_).detach() for leaf in program.leaves])
        here = {
            name: value.full_tensor() if isinstance(value, meshbook.MeshTensor) else value
            for name, value in got.items()
        }
        if why := _unlike(here, wanted):
            return f"{why}, the time {time_}"
    return ""


def _unlike(got: dict[str, torch.Tensor], wanted: dict[str, torch.Tensor]) -> str:
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


def shorten(program: Program, mesh: Mesh, *, repeated: bool = False) -> Program:
    """A program that differs in the same way, of which no line can be left out."""
    told = difference(program, mesh, repeated=repeated).partition(":")[0]
    at = len(program.lines) - 1
    while at >= 0:
        fewer = program._replace(lines=program.lines[:at] + program.lines[at + 1 :])
        try:
            fewer.run([leaf.make() for leaf in fewer.leaves])
        except Exception:  # it needs the line
            at -= 1
            continue
        if difference(fewer, mesh, repeated=repeated).partition(":")[0] == told:
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


def try_programs(mesh: Mesh, seeds: Iterable[int], *, repeated: bool = False) -> Iterator[Finding | None]:
    """For the program of each seed what it is not done as, or None."""
    for seed in seeds:
        program = write_program(seed, len(mesh.axes))
        if why := difference(program, mesh, repeated=repeated):
            shorter = shorten(program, mesh, repeated=repeated)
            yield Finding(seed, difference(shorter, mesh, repeated=repeated) or why, shorter)
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
    parser.add_argument("--repeated", action="store_true", help="each as a step under compile, some times")
    arguments = parser.parse_args()
    warnings.simplefilter("ignore")  # steps that cannot be repeated are run as they are
    wrong = 0
    for axes in arguments.axes:
        with this_host().spawn_procs(dict.fromkeys("xy"[:axes], 2), name="programs") as procs:
            if arguments.one is not None:
                program = write_program(arguments.one, axes)
                print(
                    program,
                    difference(program, Mesh(procs), repeated=arguments.repeated) or "as plain torch does",
                    sep="\n",
                )
                continue
            tried, found = 0, 0
            seeds = _seeds_for(arguments.seconds / len(arguments.axes), arguments.seed)
            for finding in try_programs(Mesh(procs), seeds, repeated=arguments.repeated):
                tried += 1
                if finding is not None:
                    found += 1
                    print(finding, "", sep="\n", flush=True)
            print(f"{axes} axes: {tried} programs, {found} not as plain torch does")
            wrong += found
    raise SystemExit(bool(wrong))


if __name__ == "__main__":
    main()
