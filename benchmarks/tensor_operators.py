"""PyTorch's own database of operators, on mesh tensors: what is right in all layouts, what is refused, what is wrong.

    python -m benchmarks.tensor_operators                        all of it
    python -m benchmarks.tensor_operators softmax nn.functional.gelu
    python -m benchmarks.tensor_operators --axes 2               on two axes alone
    python -m benchmarks.tensor_operators --write docs/operators.md

Each operator gets sample inputs of its own in float32, with sizes that are not divisible among the ranks: on two ranks
replicated, cut along the first dim and along the last one; on four in a square cut along either axis, along both in two
dims, and twice in one dim. Values and gradients are compared with those of plain torch.
"""

from __future__ import annotations

import argparse
import contextlib
import sys
import time
import warnings
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch.distributed.tensor import Replicate, Shard
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map_only

from benchmarks.faults.document import replace_block
from meshbook import MeshTensor, distribute, errors, this_host
from meshbook.distributed import Mesh
from meshbook.tensors.messages.operations import is_random

RIGHT, REFUSED, WRONG, RANDOM = "right", "refused", "wrong", "random"
CUTS: dict[int, tuple[tuple[int | None, ...], ...]] = {
    1: ((None,), (0,), (-1,)),
    2: ((0, None), (None, -1), (0, -1), (0, 0)),
}
"""By the number of a mesh's axes: the dim that each of them cuts."""


class Outcome:
    """What became of one operator's samples."""

    def __init__(self) -> None:
        self.counts: Counter[str] = Counter()
        self.why = ""

    @property
    def verdict(self) -> str:
        return next((each for each in (WRONG, RANDOM, REFUSED, RIGHT) if self.counts[each]), "")


def sweep(
    mesh: Mesh, names: Sequence[str] = (), samples: int = 3, *, times: int = 1, tell: bool = False
) -> dict[str, Outcome]:
    """The outcome of each operator with float32 inputs, or of those named.

    times: how often each is done, the last time counts; ranks do it without DTensor from the third time on. tell: what
    is not right is told at once, and how far it is.
    """
    from torch.testing._internal.common_methods_invocations import op_db

    found: dict[str, Outcome] = defaultdict(Outcome)
    for operator in op_db:
        if torch.float32 in operator.dtypes and (not names or operator.name in names):
            in_place = operator.name.removesuffix("_") + "_"
            for sample in _samples(operator, samples):
                _try(mesh, operator.name, operator.op, sample, times, found[operator.name])
                if operator.inplace_variant is not None:
                    _try(mesh, operator.name, _on_copy(operator.inplace_variant), sample, times, found[in_place])
            for name in (operator.name, in_place) if tell else ():
                if found[name].verdict in (WRONG, REFUSED):
                    print(f"{found[name].verdict}: {name}: {found[name].why}", file=sys.stderr, flush=True)
            if tell and not len(found) % 50:
                print(f"{len(found)} operators", file=sys.stderr, flush=True)
    return {name: outcome for name, outcome in found.items() if outcome.verdict}


def _samples(operator: Any, count: int) -> Iterator[Any]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        made = operator.sample_inputs("cpu", torch.float32, requires_grad=operator.supports_autograd)
        yield from (sample for sample, _ in zip(made, range(count), strict=False))


def _on_copy(in_place: Callable[..., Any]) -> Callable[..., Any]:
    """A function that works in place, on a copy that it returns; without gradients."""

    def run(tensor: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        copy = tensor.detach().clone()
        with torch.no_grad():
            in_place(copy, *args, **kwargs)
        return copy

    return run


def _try(mesh: Mesh, name: str, function: Callable[..., Any], sample: Any, times: int, outcome: Outcome) -> None:
    inputs = (sample.input, sample.args, sample.kwargs)
    try:
        with _Watch() as watch:  # type: ignore[no-untyped-call]
            wanted = _run(function, inputs)
    except Exception:  # not on this machine, whatever the tensors are
        return
    draws = watch.has_drawn or "empty" in name
    for cuts in CUTS[len(mesh.axes)]:

        def put(tensor: torch.Tensor, cuts: Sequence[int | None] = cuts) -> torch.Tensor:
            whole = Replicate()
            placements = [whole if cut is None or not tensor.dim() else Shard(cut % tensor.dim()) for cut in cuts]
            return distribute(tensor.detach(), mesh, placements=placements).requires_grad_(tensor.requires_grad)

        def put_other(tensor: torch.Tensor) -> torch.Tensor:
            other = tensor.detach() * 0.9 if tensor.is_floating_point() else tensor.detach()
            return put(other.requires_grad_(tensor.requires_grad))

        for _ in range(times - 1):
            with contextlib.suppress(errors.MeshError, RuntimeError, TypeError, NotImplementedError):
                _run(function, tree_map_only(torch.Tensor, put_other, inputs))
        try:
            got = _run(function, tree_map_only(torch.Tensor, put, inputs))
        except (errors.MeshError, RuntimeError, TypeError, NotImplementedError) as error:
            outcome.counts[REFUSED] += 1
            outcome.why = str(error).splitlines()[0]
            continue
        if draws and [each.shape for each in got] == [each.shape for each in wanted]:
            outcome.counts[RANDOM] += 1
        else:
            is_right = _equal(got, wanted)
            outcome.counts[RIGHT if is_right else WRONG] += 1
            outcome.why = outcome.why if is_right else f"wrong where axes cut dims {cuts}"


class _Watch(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Notes whether random numbers are drawn."""

    has_drawn = False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.has_drawn = self.has_drawn or is_random(func)
        return func(*args, **(kwargs or {}))


def _run(function: Callable[..., Any], inputs: tuple[Any, Any, Any]) -> list[torch.Tensor]:
    """Results, and the gradients of the sum of their squares, as tensors of this process."""
    leaves = [each for each in tree_leaves(inputs) if isinstance(each, torch.Tensor) and each.requires_grad]
    made = function(inputs[0], *inputs[1], **inputs[2])
    results = [each for each in tree_leaves(made) if isinstance(each, torch.Tensor)]
    real = [each for each in results if each.requires_grad and each.is_floating_point()]
    gradients: list[torch.Tensor] = []
    if real and leaves:
        total = sum((each * each).sum() for each in real)
        assert isinstance(total, torch.Tensor)
        gradients = [each for each in torch.autograd.grad(total, leaves, allow_unused=True) if each is not None]
    found = [each.detach() for each in (*results, *gradients)]
    here = [each.full_tensor() if isinstance(each, MeshTensor) else each for each in found]
    return [each if each.layout is torch.strided else each.to_dense() for each in here]


def _equal(got: Sequence[torch.Tensor], wanted: Sequence[torch.Tensor]) -> bool:
    return len(got) == len(wanted) and all(
        a.shape == b.shape and a.dtype == b.dtype and torch.allclose(a, b, rtol=1e-4, atol=1e-4, equal_nan=True)
        for a, b in zip(got, wanted, strict=True)
    )


def table(found: Mapping[int, Mapping[str, Outcome]]) -> list[str]:
    """For a document: found by the number of a mesh's axes."""
    lines = [f"- {_summary(axes, outcomes)}" for axes, outcomes in found.items()]
    for verdict in (WRONG, REFUSED):
        rows = _rows(found, verdict)
        if rows:
            lines += ["", f"| {verdict} | axes | why |", "| --- | --- | --- |", *rows]
    return lines


def _summary(axes: int, outcomes: Mapping[str, Outcome]) -> str:
    counts = Counter(outcome.verdict for outcome in outcomes.values())
    return (
        f"on {' x '.join('2' * axes)} ranks, of {len(outcomes)} operators: {counts[RIGHT]} right in all layouts, "
        f"{counts[WRONG]} wrong, {counts[REFUSED]} refused in some layout; {counts[RANDOM]} give what chance, or "
        "memory, says (compared by shape)"
    )


def _rows(found: Mapping[int, Mapping[str, Outcome]], verdict: str) -> list[str]:
    """One for each operator and its words, with the numbers of axes for which they are said."""
    said: dict[tuple[str, str], list[str]] = defaultdict(list)
    for axes, outcomes in found.items():
        for name, outcome in outcomes.items():
            if outcome.verdict == verdict:
                said[name, outcome.why[:160].replace("|", "&#124;")].append(str(axes))
    return [f"| `{name}` | {', '.join(axes)} | {why} |" for (name, why), axes in sorted(said.items())]


def main() -> None:
    parser = argparse.ArgumentParser(description="operators on mesh tensors beside plain torch")
    parser.add_argument("names", nargs="*", help="of operators; all by default")
    parser.add_argument("--samples", type=int, default=2, help="inputs for each operator")
    parser.add_argument("--times", type=int, default=1, help="3: also as the ranks do it without DTensor")
    parser.add_argument("--axes", type=int, nargs="*", choices=list(CUTS), default=list(CUTS), help="of meshes to try")
    parser.add_argument("--write", type=Path, help="a document whose table of operators to replace")
    arguments = parser.parse_args()
    found: dict[int, dict[str, Outcome]] = {}
    for axes in arguments.axes:
        begun = time.monotonic()
        with this_host().spawn_procs(dict.fromkeys("xy"[:axes], 2), name="operators") as procs:
            found[axes] = sweep(Mesh(procs), arguments.names, arguments.samples, times=arguments.times, tell=True)
        print(f"{axes} axes: {time.monotonic() - begun:.0f} s", file=sys.stderr)
    lines = table(found)
    print("\n".join(lines))
    if arguments.write:
        replace_block(arguments.write, "operators", "\n".join(lines) + "\n")


if __name__ == "__main__":
    main()
