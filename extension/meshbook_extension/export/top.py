"""The top of a script: how it is run, what it imports, the functions that it needs, and the names that ranks have."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping

from meshbook.formatting import format_sizes
from meshbook_extension.export.plain_python import SHOW, names_of
from meshbook_extension.export.program import RecordedProgram

MARK = "Exported by Meshbook's %mesh export"
END = "dist.destroy_process_group()\n"
_HELPERS = {
    SHOW: """
def show_value(value):
    \"\"\"Print the value of a cell's last expression.\"\"\"
    if value is not None:
        print(repr(value))
""",
    "show_once": """
def show_once(value):
    \"\"\"Print the value of a cell's last expression, on one rank.\"\"\"
    value = whole(value)
    if value is not None and rank == 0:
        print(repr(value))
""",
    "print_once": """
def print_once(*values, **options):
    \"\"\"Print on one rank.\"\"\"
    values = [whole(value) for value in values]
    if rank == 0:
        print(*values, **options)
""",
    "whole": """
def whole(value):
    \"\"\"Return all of a DTensor; anything else as it is.\"\"\"
    return value.full_tensor() if isinstance(value, DTensor) else value
""",
    "broadcast_object": """
def broadcast_object(value, src=0):
    \"\"\"Return the value of rank src on every rank.\"\"\"
    values = [value]
    dist.broadcast_object_list(values, src=src)
    return values[0]
""",
    "gather_objects": """
def gather_objects(value, ranks):
    \"\"\"Return the values of these ranks by rank, on rank 0.\"\"\"
    values = [None] * world_size if rank == 0 else None
    dist.gather_object(value, values)
    return {each: values[each] for each in ranks} if rank == 0 else None
""",
    "join_parts": """
def join_parts(parts, dim):
    \"\"\"Return parts as one: tensors along a dim, lists end to end.\"\"\"
    if torch.is_tensor(parts[0]):
        return torch.cat(parts, dim) if parts[0].ndim else torch.stack(parts)
    return [item for part in parts for item in part]
""",
    "take_piece": """
def take_piece(value, index, count, dim):
    \"\"\"Return one of count pieces of a tensor or a list, which differ by one at most.\"\"\"
    if torch.is_tensor(value):
        return torch.tensor_split(value, count, dim)[index].contiguous()
    length, extra = divmod(len(value), count)
    low = index * length + min(index, extra)
    return value[low : low + length + (index < extra)]
""",
}
"""The functions that a script may need."""
_IMPORTS = {
    "asyncio": "import asyncio",
    "copy": "import copy",
    "os": "import os",
    "subprocess": "import subprocess",
    "timeit": "import timeit",
    "Path": "from pathlib import Path",
    "torch": "import torch",
    "init_device_mesh": "from torch.distributed.device_mesh import init_device_mesh",
    "distribute_tensor": "from torch.distributed.tensor import distribute_tensor",
    "distribute_module": "from torch.distributed.tensor import distribute_module",
    "DTensor": "from torch.distributed.tensor import DTensor",
    "Shard": "from torch.distributed.tensor import Shard",
    "Replicate": "from torch.distributed.tensor import Replicate",
}
"""The imports of names that a script uses and no cell binds."""


def write_top(program: RecordedProgram, body: str, futures: str, title: str, file: str, *, has_tensors: bool) -> str:
    """Return all that stands above the cells. futures: the cells' imports from __future__.

    has_tensors: whether the script has DTensors in place of mesh tensors.
    """
    axes, is_cuda, names = program.mesh.axes, program.mesh.device == "cuda", names_of(body)
    needed = names.used | {"whole"} if has_tensors else names.used
    helpers = {name: text.strip() for name, text in _HELPERS.items() if name in needed}
    used = {*names.used, *names_of("\n".join(helpers.values())).used}
    start = []
    if "device" in used or is_cuda:
        start.append('device = torch.device("cuda", local_rank)' if is_cuda else 'device = torch.device("cpu")')
    start += ["torch.cuda.set_device(device)"] if is_cuda else []
    if not program.makes_group:
        start.append(f'dist.init_process_group("{"nccl" if is_cuda else "gloo"}")')
    if "mesh" in used and not (has_tensors and "mesh" in names.bound):
        start.append(write_mesh(program.mesh.device, axes))
    start += [write_point(axes)] if "point" in used else []
    start += ["loop = asyncio.new_event_loop()"] if "loop" in used - names.bound else []
    used |= names_of("\n".join(start)).used
    numbers = [name for name in ("rank", "local_rank", "world_size") if name in used]
    start = [*(f'{name} = int(os.environ["{name.upper()}"])' for name in numbers), *start]
    used |= {"os"} if numbers else set()
    imports = [text for name, text in _IMPORTS.items() if name in used and (name.islower() or name not in names.bound)]
    plain = _in_order(each for each in imports if "torch" not in each)
    torch = _in_order([*(each for each in imports if "torch" in each), "import torch.distributed as dist"])
    packages = " ".join(program.packages)
    needs = f"\nIt needs these packages: {packages}\n" if packages else ""
    run = f"Run it:\n\n    {program.command} {file}\n{needs}"
    heading = f'"""{title}\n\n{MARK}, from a mesh of {format_sizes(axes)}. {run}"""'
    functions = [f"\n{text}" for text in helpers.values()]
    parts = [heading, futures.strip(), plain, torch, *functions, "\n" * bool(helpers) + "\n".join(start)]
    return "\n\n".join(part for part in parts if part)


def write_mesh(device: str, axes: Mapping[str, int]) -> str:
    """Return the line that makes torch's mesh of these axes."""
    sizes, labels = (", ".join(map(str, each)) for each in (axes.values(), (f'"{axis}"' for axis in axes)))
    comma = "," * (len(axes) == 1)
    return f'mesh = init_device_mesh("{device}", ({sizes}{comma}), mesh_dim_names=({labels}{comma}))'


def write_point(axes: Mapping[str, int]) -> str:
    """Return the line that gives a rank its coordinates along these axes."""
    return f"point = {{{', '.join(_coordinates(axes))}}}"


def _coordinates(axes: Mapping[str, int]) -> Iterator[str]:
    """Yield the coordinate of a rank along each axis, as Python."""
    step = whole = math.prod(axes.values())
    for axis, size in axes.items():
        is_first, step = step == whole, step // size
        index = "rank" if step == 1 else f"rank // {step}"
        yield f'"{axis}": {index if is_first else f"{index} % {size}"}'


def _in_order(imports: Iterable[str]) -> str:
    """Return imports in order; names of one module share a line."""
    plain, by_module = [], defaultdict(list)
    for text in imports:
        module, _, name = text.removeprefix("from ").partition(" import ")
        if name:
            by_module[module].append(name)
        else:
            plain.append(text)
    named = (f"from {module} import {', '.join(sorted(names))}" for module, names in sorted(by_module.items()))
    return "\n".join([*sorted(plain), *named])
