"""PyTorch's own database of operators, on mesh tensors: what is right in all layouts, what is refused, what is wrong.

    python -m benchmarks.tensor_operators                        all of it, some minutes
    python -m benchmarks.tensor_operators softmax nn.functional.gelu
    python -m benchmarks.tensor_operators --write docs/tensors.md

Each operator gets sample inputs of its own in float32, with sizes that are not divisible among the ranks: on two ranks
replicated, cut along the first dim and along the last one; on four in a square cut along either axis, along both in two
dims, and twice in one dim. Values and gradients are compared with those of plain torch.
"""

from __future__ import annotations

import argparse
import warnings
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from torch.distributed.tensor import Replicate, Shard
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map_only

from benchmarks.faults.document import replace_block
from meshbook import MeshTensor, distribute, errors, this_host
from meshbook.distributed import Mesh
from meshbook.tensors.operations import is_random

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


def sweep(mesh: Mesh, names: Sequence[str] = (), samples: int = 3) -> dict[str, Outcome]:
    """The outcome of each operator with float32 inputs, or of those named."""
    from torch.testing._internal.common_methods_invocations import op_db

    found: dict[str, Outcome] = defaultdict(Outcome)
    for operator in op_db:
        if torch.float32 in operator.dtypes and (not names or operator.name in names):
            for sample in _samples(operator, samples):
                _try(mesh, operator.name, operator.op, sample, found[operator.name])
                if operator.inplace_variant is not None:
                    _try(mesh, operator.name, _on_copy(operator.inplace_variant), sample, found[f"{operator.name}_"])
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


def _try(mesh: Mesh, name: str, function: Callable[..., Any], sample: Any, outcome: Outcome) -> None:
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


def table(found: dict[str, Outcome]) -> list[str]:
    """For a document."""
    counts = Counter(outcome.verdict for outcome in found.values())
    named = {verdict: sorted(n for n, o in found.items() if o.verdict == verdict) for verdict in counts}
    lines = [
        f"Of {len(found)} operators {counts[RIGHT]} are right in all layouts, {counts[WRONG]} wrong; {counts[RANDOM]} "
        f"give what chance, or memory, says (compared by shape); {counts[REFUSED]} are refused in some layout:",
        "",
        "| refused | with the words |",
        "| --- | --- |",
        *(f"| `{name}` | {found[name].why[:160].replace('|', '&#124;')} |" for name in named.get(REFUSED, [])),
        "",
        "Right: " + ", ".join(f"`{name}`" for name in named.get(RIGHT, [])) + ".",
    ]
    if named.get(WRONG):
        lines += ["", "**Wrong**: " + ", ".join(f"`{name}`" for name in named[WRONG]) + "."]
    return lines


def main() -> None:
    parser = argparse.ArgumentParser(description="operators on mesh tensors beside plain torch")
    parser.add_argument("names", nargs="*", help="of operators; all by default")
    parser.add_argument("--samples", type=int, default=3, help="inputs for each operator")
    parser.add_argument("--write", type=Path, help="a document whose table of operators to replace")
    arguments = parser.parse_args()
    with this_host().spawn_procs({"gpus": 2}, name="operators") as procs:
        lines = table(sweep(Mesh(procs), arguments.names, arguments.samples))
    print("\n".join(lines))
    if arguments.write:
        replace_block(arguments.write, "operators", "\n".join(lines) + "\n")


if __name__ == "__main__":
    main()
