"""Random programs on tensors: lines of Python on ``t0``, ``t1`` and so on, each of which plain torch has done.

Views, operations in place, reductions, products, indexing, concatenation, other layouts. A line is written, tried on
plain tensors, and kept where it gives numbers that can be compared, and gradients.
"""

from __future__ import annotations

import random
import warnings
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch.distributed.tensor import Placement, Replicate, Shard

from meshbook import MeshTensor, distribute
from meshbook.distributed import Mesh

SIZES = (0, 1, 1, 2, 3, 3, 4, 5, 6, 7)
LARGEST = 1e6  # no value is larger: sums would hide small ones
MOST_ELEMENTS = 4000


class Leaf(NamedTuple):
    """A tensor that a program begins with."""

    shape: tuple[int, ...]
    dims: tuple[int | None, ...]  # which dim each axis of the mesh cuts
    seed: int
    graded: bool

    def make(self, time: int = 0) -> torch.Tensor:
        """time: other values each time."""
        generator = torch.Generator().manual_seed(self.seed + time)
        values = torch.rand(self.shape, generator=generator, dtype=torch.float64)
        return (values * 4 - 2).requires_grad_(self.graded)

    def place(self, mesh: Mesh, time: int = 0) -> MeshTensor:
        return distribute(self.make(time), mesh, placements=to_placements(self.dims))


class Program(NamedTuple):
    """What it begins with, and what it does."""

    leaves: tuple[Leaf, ...]
    lines: tuple[str, ...]

    def __str__(self) -> str:
        begun = [f"t{at} = {leaf}" for at, leaf in enumerate(self.leaves)]
        return "\n".join([*begun, *self.lines])

    def run(self, leaves: Sequence[torch.Tensor]) -> dict[str, torch.Tensor]:
        """What its tensors are then, and the gradients of the sum of their squares; all here."""
        return {name: _here(value) for name, value in self.results(leaves).items()}

    def results(self, leaves: Sequence[torch.Tensor]) -> dict[str, torch.Tensor]:
        """The same, where it is."""
        names: dict[str, Any] = {f"t{at}": leaf for at, leaf in enumerate(leaves)}
        for line in self.lines:
            run_line(line, names)
        found = {name: value for name, value in names.items() if isinstance(value, torch.Tensor)}
        graded = [each for each in leaves if each.requires_grad]
        real = [each for each in found.values() if each.requires_grad and each.numel()]
        if graded and real:
            total = sum((each * each).sum() for each in real)
            assert isinstance(total, torch.Tensor)
            for at, gradient in enumerate(torch.autograd.grad(total, graded, allow_unused=True)):
                if gradient is not None:
                    found[f"gradient of leaf {at}"] = gradient
        return found


def to_placements(dims: Sequence[int | None]) -> list[Placement]:
    return [Replicate() if dim is None else Shard(dim) for dim in dims]


def _here(tensor: torch.Tensor) -> torch.Tensor:
    whole = tensor.full_tensor() if isinstance(tensor, MeshTensor) else tensor
    return whole.detach().clone()


def laid(tensor: torch.Tensor, *dims: int | None) -> torch.Tensor:
    """The tensor in another layout, of which plain torch knows nothing."""
    if isinstance(tensor, MeshTensor):
        return tensor.redistribute(placements=to_placements(dims[: len(tensor.mesh.axes)]))
    return tensor.clone()


def run_line(line: str, names: dict[str, Any]) -> None:
    code = compile(line, "<program>", "exec")
    exec(code, {"torch": torch, "F": torch.nn.functional, "laid": laid}, names)


# ---- how lines are written ------------------------------------------------------------------------------------------


class Writer:
    """Writes one program, as chance says."""

    def __init__(self, seed: int, axes: int) -> None:
        self.random = random.Random(seed)
        self.axes = axes
        self.tensors: dict[str, torch.Tensor] = {}

    def write(self, length: int) -> Program:
        leaves = tuple(self._leaf() for _ in range(self.random.choice((1, 2, 2, 3))))
        self.tensors = {f"t{at}": leaf.make() for at, leaf in enumerate(leaves)}
        lines: list[str] = []
        for _ in range(20 * length):
            if len(lines) == length:
                break
            line = self.random.choice(KINDS)(self)
            if line is not None and self._works(line, leaves, lines):
                lines.append(line)
        return Program(leaves, tuple(lines))

    def _works(self, line: str, leaves: Sequence[Leaf], lines: Sequence[str]) -> bool:
        """Whether plain torch does it, gradients as well, and it gives numbers that can be compared."""
        program = Program(tuple(leaves), (*lines, line))
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("error")
                values = program.run([leaf.make() for leaf in leaves])
                names: dict[str, Any] = {f"t{at}": leaf.make() for at, leaf in enumerate(leaves)}
                for each in program.lines:
                    run_line(each, names)
        except Exception:
            return False
        for value in values.values():
            if value.numel() > MOST_ELEMENTS or not value.double().abs().lt(LARGEST).all():
                return False
        self.tensors = {name: value for name, value in names.items() if isinstance(value, torch.Tensor)}
        return True

    def _leaf(self) -> Leaf:
        shape = tuple(self.random.choice(SIZES) for _ in range(self.random.choice((1, 2, 2, 3))))
        return Leaf(shape, self.layout(len(shape)), self.random.randrange(1 << 20), self.random.random() < 0.7)

    def layout(self, dims: int) -> tuple[int | None, ...]:
        return tuple(self.random.choice([None, *range(dims)]) for _ in range(self.axes))

    def pick(self, dims: int = 0, *, floating: bool = True) -> str:
        """The name of a tensor with that many dims at least. Raises: LookupError where there is none."""
        fitting = [n for n, t in self.tensors.items() if t.dim() >= dims and t.is_floating_point() >= floating]
        recent = fitting[-4:]
        return self.random.choice(recent if recent and self.random.random() < 0.6 else fitting)

    def dim(self, name: str) -> int:
        count = self.tensors[name].dim()
        return self.random.randrange(-count, count)

    def size(self, name: str, dim: int) -> int:
        return self.tensors[name].shape[dim]

    def new(self) -> str:
        return f"t{len(self.tensors)}"


Kind = Callable[[Writer], "str | None"]
KINDS: list[Kind] = []  # ways to write a line; each is as likely as the others


def kind(times: int = 1) -> Callable[[Callable[[Writer], str]], Kind]:
    """Names a way to write a line, as likely as so many others."""

    def keep(write: Callable[[Writer], str]) -> Kind:
        def tried(writer: Writer) -> str | None:
            try:
                return write(writer)
            except (LookupError, ValueError):  # no tensor here that it could be about
                return None

        KINDS.extend([tried] * times)
        return tried

    return keep


@kind(times=3)
def view(writer: Writer) -> str:
    name = writer.pick(1, floating=False)
    dim, other = writer.dim(name), writer.dim(name)
    size, shape = writer.size(name, dim), list(writer.tensors[name].shape)
    chance = writer.random
    at = chance.randrange(size) if size else 0
    order = chance.sample(range(len(shape)), len(shape))
    factors = _factors(size, chance)
    merged = [*shape[:1], -1] if 0 not in shape and len(shape) > 1 else [-1]
    choice = chance.choice(
        [
            f"transpose({dim}, {other})", f"permute({order})", f"unsqueeze({dim})", "squeeze()", f"squeeze({dim})",
            f"narrow({dim}, {at}, {chance.randint(0, size - at)})", f"select({dim}, {at})", "mT", "flatten()",
            f"flatten({min(dim, other)})", f"unflatten({dim}, {factors})", f"reshape({merged})", f"view({merged})",
            f"view({shape[:-1] + list(_factors(shape[-1], chance))})", f"unbind({dim})[{at}]", f"movedim({dim}, 0)",
            f"split({max(1, size // 2)}, {dim})[-1]", f"chunk(2, {dim})[-1]", f"tensor_split(3, {dim})[1]",
            f"diagonal(0, {dim}, {other})", f"[..., None].expand({[*shape, 3]})", f"[{at}:]", "[..., ::2]", "[-1]",
            f"[..., {at}]", f"[None, :, {at}:]", "detach()", f"unfold({dim}, {max(1, size // 2)}, 1)",
            f"expand({[2, *shape]})", "swapaxes(0, -1)", f"view_as({name})", "ravel()",
        ]
    )  # fmt: skip
    return f"{writer.new()} = {name}{'' if choice[0] == '[' else '.'}{choice}"


def _factors(size: int, chance: random.Random) -> tuple[int, ...]:
    divisors = [each for each in range(1, size + 1) if size % each == 0] or [1]
    first = chance.choice(divisors)
    return (first, size // first) if chance.random() < 0.7 else (first, -1)


@kind(times=3)
def in_place(writer: Writer) -> str:
    name, other = writer.pick(), writer.pick()
    dim = writer.dim(name) if writer.tensors[name].dim() else 0
    size = writer.size(name, dim) if writer.tensors[name].dim() else 0
    at = writer.random.randrange(size) if size else 0
    choice = writer.random.choice(
        [
            ".add_(1.5)", ".mul_(0.5)", f".add_({other})", f".mul_({other})", f".sub_({other}, alpha=0.3)", ".zero_()",
            ".fill_(0.7)", f".copy_({other})", ".clamp_(-1, 0.8)", ".tanh_()", ".relu_()", ".neg_()", ".sigmoid_()",
            f".masked_fill_({name} > 0.2, -0.4)", f"[{at}] = 0.3", f"[{at}:] *= 2", f"[..., 0] = {other}",
            f".index_fill_({dim}, torch.tensor([{at}]), 1.25)", f".select({dim}, {at}).add_(1)", "[..., ::2] += 1",
            f".narrow({dim}, {at}, {size - at}).mul_(-0.5)", f"[{name} < 0] = 0.1", f".transpose(0, {dim}).add_(0.1)",
            f".index_add_({dim}, torch.tensor([{at}]), {name}.narrow({dim}, {at}, 1).detach() * 0.5)",
            f".lerp_({other}, 0.25)", f".cumsum_({dim})", f".addcmul_({other}, {other}, value=0.2)",
            ".flatten().mul_(2)",
            f".index_copy_({dim}, torch.tensor([{at}]), {name}.narrow({dim}, {at}, 1).detach() + 0.5)", ".t_()",
            f".unsqueeze_({dim})", ".view(-1)[:2].add_(0.2)", f".transpose_({dim}, 0)", ".div_(2)", ".exp_().log_()",
            ".triu_()", f".diagonal().add_({at} + 0.5)", f".view(-1).copy_({name}.detach().flatten().flip(0))",
        ]
    )  # fmt: skip
    return f"{name}{choice}"


@kind(times=2)
def elementwise(writer: Writer) -> str:
    name, other, third = writer.pick(), writer.pick(), writer.pick()
    choice = writer.random.choice(
        [
            f"{name} + {other}", f"{name} * {other}", f"{name} - {other}", f"{name} / (2.5 + {other}.abs())",
            f"{name} * 1.5 + 0.25", f"torch.tanh({name})", f"{name}.sigmoid() * {other}", f"{name}.exp().clamp(max=4)",
            f"torch.where({name} > {other}, {name}, {third})", f"torch.maximum({name}, {other})",
            f"{name}.abs().sqrt()", f"F.gelu({name})", f"F.silu({name}) - {other}", f"{name}.square()", f"{name} ** 3",
            f"{name}.clamp(-0.5, 1)", f"F.relu({name} - 0.1)", f"torch.addcmul({name}, {other}, {third})",
            f"{name}.lerp({other}, 0.3)", f"{name}.sin() + {other}.cos()", f"-{name}",
            f"{name}.masked_fill({other} > 0, 0.5)", f"({name} > {other}) & ({name} > 0)", f"{name} % 0.7",
            f"{name}.round()", f"{name}.double()", f"({name} * 3).long()", f"F.softplus({name})", f"{name}.clone()",
            f"{name}.contiguous()", f"torch.zeros_like({name}) + {other}", f"{name}.new_ones(3)",
            f"F.dropout({name}, 0.5, training=False)", f"torch.atan2({name}, {other})", f"{name}.float().double()",
        ]
    )  # fmt: skip
    return f"{writer.new()} = {choice}"


@kind(times=2)
def reduction(writer: Writer) -> str:
    name = writer.pick()
    dim = writer.dim(name) if writer.tensors[name].dim() else 0
    keep = writer.random.choice(["", ", keepdim=True"])
    count = writer.tensors[name].dim()
    dims = [each - writer.random.choice((0, count)) for each in writer.random.sample(range(count), min(count, 2))]
    nan = f"torch.where({name} > 1, float('nan'), {name}.detach())"
    choice = writer.random.choice(
        [
            "sum()", f"sum({dim}{keep})", f"mean({dim}{keep})", "mean()", f"amax({dim}{keep})", "max()", "min()",
            f"max({dim}{keep}).values", f"min({dim}{keep}).indices", f"var({dim}{keep})", "std()",
            f"logsumexp({dim}{keep})", "norm()", f"norm(dim={dim}{keep})", f"softmax({dim})", f"log_softmax({dim})",
            f"cumsum({dim})", f"prod({dim}{keep})", f"argmax({dim}{keep})", "argmax()", f"gt(0).any({dim}{keep})",
            "gt(0).all()", f"sort({dim}).values", f"median({dim}{keep}).values", f"topk(1, {dim}).values",
            f"argsort({dim})", f"cummax({dim}).values", f"cumprod({dim})", f"diff(dim={dim})", f"norm(1, {dim}{keep})",
            f"aminmax(dim={dim}{keep}).max", f"gt(0.3).sum({dim}{keep})", "sum((0, -1))", "trace()",
            f"logcumsumexp({dim})", f"count_nonzero({dim})", "gt(0).sum()", f"std({dim}{keep})",
            f"renorm(2, {dim}, 1.0)", f"sum({dims}{keep})", f"mean({dims}{keep})", f"amin({dims}{keep})",
            f"logsumexp({dims}{keep})", f"var({dims}, correction=2{keep})", f"norm(3, {dims}{keep})",
            f"norm(float('inf'), {dims}{keep})", f"std({dims}, correction=0{keep})", f"nansum({dims}{keep})",
            f"gt(0.3).any({dims}{keep})", f"prod({dim}{keep})", f"kthvalue(1, {dim}{keep}).values",
            f"mode({dim}{keep}).values", f"topk(1, {dim}, largest=False).indices", f"quantile(0.3, {dim}{keep})",
            f"sort(dim={dim}, stable=True, descending=True).indices", f"abs().histc(4, {len(dims)}, 1)",
            f"byte().any({dim}{keep})",
            f"cummin({dim}).indices", f"argmin({dim}{keep})", f"diff(2, {dim})", f"to(torch.int32).sum({dims}{keep})",
        ]
    )  # fmt: skip
    if writer.random.random() < 0.1:
        some = writer.random.choice([f"amax({dims}{keep})", "min()", f"norm(float('inf'), {dim})", f"nanmean({dim})"])
        return f"{writer.new()} = {nan}.{some}.nan_to_num(-3.0)"
    return f"{writer.new()} = {name}.{choice}"


@kind(times=2)
def product(writer: Writer) -> str:
    name, other, third = writer.pick(1), writer.pick(1), writer.pick()
    choice = writer.random.choice(
        [
            f"{name} @ {other}", f"{name} @ {other}.mT", f"{name}.mT @ {other}", f"{name} @ {name}.mT",
            f"{name}.mT @ {name}", f"F.linear({name}, {other})", f"torch.outer({name}.flatten(), {other}.flatten())",
            f"{name}.flatten() @ {name}.flatten()", f"torch.einsum('...ij,...kj->...ik', {name}, {other})",
            f"torch.einsum('ij,ij->i', {name}, {other})", f"torch.addmm({third}, {name}, {other})",
            f"torch.bmm({name}, {name}.mT)", f"torch.tensordot({name}, {other}, 1)",
            f"torch.kron({name}.clone(), {other}.clone())", f"F.linear({name}, {other}, {third})",
            f"torch.cdist({name}, {name} + 1)", f"torch.einsum('ij->ji', {name})",
            f"torch.einsum('i...,i...->...', {name}, {name})", f"F.scaled_dot_product_attention(*[{name}[None]] * 3)",
            f"torch.mv({name}, {other})", f"torch.matmul({other}, {name})",
        ]
    )  # fmt: skip
    return f"{writer.new()} = {choice}"


@kind(times=2)
def indexing(writer: Writer) -> str:
    name, other = writer.pick(1), writer.pick()
    dim = writer.dim(name)
    size = writer.size(name, dim)
    some = [writer.random.randrange(size) for _ in range(writer.random.randint(0, 4))] if size else []
    first = [writer.random.randrange(writer.size(name, 0)) for _ in range(2)]
    indices = f"torch.tensor({some}, dtype=torch.long)"
    choice = writer.random.choice(
        [
            f"{name}.index_select({dim}, {indices})", f"{name}[{first}]", f"{name}[torch.tensor({first})]",
            f"{name}[..., {first}]", f"{name}.gather({dim}, {name}.argsort({dim}))",
            f"torch.take_along_dim({name}, {name}.argsort({dim}), {dim})", f"{name}[{name} > 0]",
            f"{name}.masked_select({name} > 0.5)", f"{name}.roll(1, {dim})", f"{name}.flip({dim})", f"{name}.roll(-2)",
            f"{name}.flip({dim}, {-1 - dim % 2})", f"{name}.roll((1, -2), ({dim}, 0))",
            f"{name}.scatter_reduce({dim}, {name}.argsort({dim}), {name} * 2, 'amax', include_self=False)",
            f"{name}.index_reduce({dim}, {indices}, {name}.index_select({dim}, {indices}), 'mean')",
            f"{name}.slice_scatter({name}.narrow({dim}, 0, 1) * 3, {dim}, -1)", f"{name}.tril()",
            f"{name}.triu(1)", f"F.pad({name}, (1, 2))", f"F.pad({name}, (0, -1))",
            f"{name}.repeat_interleave(2, {dim})", f"{name}.scatter({dim}, {name}.argsort({dim}), {name} * 2)",
            f"{name}.scatter_add({dim}, {name}.argsort({dim}), {name})",
            f"{name}.index_add({dim}, {indices}, {name}.index_select({dim}, {indices}))", f"{name}.nonzero()",
            f"{name}.take({indices})", f"torch.diag_embed({name})", f"{name}.rot90()",
            f"{name}.index_put((torch.tensor({first}),), torch.tensor(0.5, dtype=torch.float64))",
            f"F.embedding(({name}[{first}] * 0).long(), {name})", f"F.one_hot(({name}.abs()).long(), 4)",
            f"{name}.diagonal_scatter({name}.diagonal() * 2)",
            f"{name}.select_scatter({name}.select({dim}, 0) + 1, {dim}, 0)",
            f"torch.searchsorted({name}.flatten().sort().values, {other})",
            f"F.embedding(torch.tensor({[first, first]}), {name})", f"{name}[None, 0, ..., None]", f"{name}.unique()",
        ]
    )  # fmt: skip
    return f"{writer.new()} = {choice}"


@kind()
def joining(writer: Writer) -> str:
    name, other = writer.pick(1), writer.pick(1)
    dim = writer.dim(name)
    choice = writer.random.choice(
        [
            f"torch.cat([{name}, {other}], {dim})", f"torch.cat([{name}, {name} * 2], {dim})",
            f"torch.stack([{name}, {name} + 1], {dim})", f"torch.stack([{name}, {other}])",
            f"torch.hstack([{name}, {other}])", f"{name}.repeat({[2] * (writer.tensors[name].dim() + 1)})",
            f"{name}.tile((2,))", f"torch.cat([{name}.narrow({dim}, 0, 1), {name}], {dim})",
            f"torch.block_diag({name}, {other})", f"torch.cat({name}.split(2, {dim})[::-1], {dim})",
            f"torch.vstack([{name}, {name}])", f"torch.meshgrid({name}, {name}, indexing='ij')[0]",
        ]
    )  # fmt: skip
    return f"{writer.new()} = {choice}"


@kind()
def module(writer: Writer) -> str:
    name, other = writer.pick(1), writer.pick(1)
    last = writer.size(name, -1)
    how = writer.random.choice(["mean", "mean", "sum", "none"])
    choice = writer.random.choice(
        [
            f"F.layer_norm({name}, ({last},))", f"F.mse_loss({name}, {other})", f"F.smooth_l1_loss({name}, {other})",
            f"F.cross_entropy({name}, {name}.detach().argmax(-1))", f"F.l1_loss({name}, {other}, reduction='sum')",
            f"F.cross_entropy({name}, {name}.detach().softmax(-1))", f"F.huber_loss({name}, {other})",
            f"F.rms_norm({name}, ({last},))", f"F.binary_cross_entropy_with_logits({name}, {name}.detach().sigmoid())",
            f"F.kl_div({name}.log_softmax(-1), {name}.detach().softmax(-1))",
            f"F.cross_entropy({name}, {name}.detach().argmax(-1), ignore_index=1, reduction='{how}')",
            f"F.cross_entropy({name}, {name}.detach().argmin(-1), weight={name}.detach()[0].abs(), reduction='{how}')",
            f"F.cross_entropy({name}, {name}.detach().argmax(-1), label_smoothing=0.1, ignore_index=0)",
            f"F.embedding({name}.detach().argmax(-1), {other}, scale_grad_by_freq=True)",
            f"F.embedding({name}.detach().argmin(0), {other}, padding_idx=0)",
            f"F.cosine_similarity({name}, {other}, -1)", f"F.normalize({name}, dim=-1)", f"F.glu({name})",
            f"F.leaky_relu({name})",
            f"F.nll_loss({name}.log_softmax(-1), {name}.detach().argmin(-1), reduction='none')",
            f"F.avg_pool1d({name}, 2)", f"F.max_pool1d({name}, 2)", f"F.conv1d({name}, {name}[..., :2])",
            f"F.batch_norm({name}, None, None, training=True)", f"F.group_norm({name}, 1)", f"F.elu({name})",
        ]
    )  # fmt: skip
    return f"{writer.new()} = {choice}"


@kind()
def other_layout(writer: Writer) -> str:
    name = writer.pick(floating=False)
    dims = writer.layout(writer.tensors[name].dim())
    return f"{writer.new()} = laid({name}, {', '.join(map(str, dims))})"


def write_program(seed: int, axes: int) -> Program:
    """The program of a seed, for a mesh of so many axes."""
    return Writer(seed, axes).write(length=1 + seed % 12)
