"""Programs with mesh tensors as programs with DTensors: each rank runs all of them, and rank 0 prints.

meshbook.Mesh(shape=(2, 2), mesh_dim_names=("dp", "tp"))    init_device_mesh(device.type, (2, 2), mesh_dim_names=...)
meshbook.distribute(x, mesh, ["dp", None])                  distribute_tensor(x, mesh, [Shard(0), Replicate()])
meshbook.module_to_mesh(model, mesh)                        distribute_module(model, mesh)
loss.item()                                                 whole(loss).item(); DTensor's is the part of a rank
meshbook.zeros(4, 4, mesh=mesh, sharding_spec=["dp"])       torch.distributed.tensor.zeros(4, 4, device_mesh=mesh, ...)
"""

from __future__ import annotations

import ast
from collections.abc import Iterable
from typing import TYPE_CHECKING

from meshbook_extension.export.plain_python import Edits, NotPlain, names_of

if TYPE_CHECKING:
    from meshbook_extension.export.program import CellPart

FACTORIES = frozenset({"zeros", "ones", "full", "empty"})
KNOWN = frozenset({"Mesh", "distribute", "module_to_mesh", "compile"}) | FACTORIES
RANDOM = frozenset({"rand", "randn", "randint", "arange"})
REACHING = frozenset(
    {"push", "execute", "evaluate", "scatter", "broadcast", "spawn", "from_ranks", "activate", "to_mesh"}
)
"""Methods of meshes by which Python code of the notebook reaches ranks."""
WRONG = frozenset({"mse_loss", "MSELoss", "smooth_l1_loss", "SmoothL1Loss", "huber_loss", "HuberLoss"})
"""Losses whose mean has other gradients as a DTensor in parts: torch divides by the size of a part."""
OTHERS = RANDOM | {"stream", "heal_mesh", "elastic", "save", "restore"}
INSTEAD = "a script of torchrun has no controller: write it in a %%mesh cell, or leave the cell out"


class MeshNames:
    """The notebook's names that mean meshes, and what is on them."""

    def __init__(self, parts: Iterable[CellPart]) -> None:
        """parts: the notebook's statements, in their order."""
        self._modules: set[str] = set()
        self._functions: dict[str, str] = {}
        self._axes: dict[str, tuple[str, ...]] = {}
        """The axes of each mesh, by its name in the notebook."""
        self._on_mesh: set[str] = set()
        self._parts: dict[int, CellPart] = {}
        for part in parts:
            self._read(part)

    def has(self, part: CellPart) -> bool:
        """Whether a statement makes or uses something on a mesh."""
        return id(part) in self._parts

    def _read(self, part: CellPart) -> None:
        tree = ast.parse(part.plain.text if part.plain else "")
        for node in ast.walk(tree):
            match node:
                case ast.Import(names=aliases):
                    self._modules |= {each.asname or each.name for each in aliases if each.name == "meshbook"}
                case ast.ImportFrom(module="meshbook" | "meshbook.distributed", names=aliases):
                    self._functions |= {each.asname or each.name: each.name for each in aliases}
                case ast.Call() if self._function(node.func) in KNOWN | OTHERS:
                    self._parts[id(part)] = part
                case ast.Call(func=ast.Attribute(value=ast.Name(id="procs"), attr=name)) if name in REACHING:
                    self._parts[id(part)] = part
        if part.names.used & self._on_mesh:
            self._parts[id(part)] = part
        if id(part) in self._parts:
            self._on_mesh |= part.names.bound

    def _function(self, node: ast.expr) -> str:
        """Return the name of a function of meshbook; empty for anything else."""
        match node:
            case ast.Attribute(value=ast.Name(id=module), attr=name) if module in self._modules:
                return name
            case ast.Name(id=name):
                return self._functions.get(name, "")
        return ""

    def translate(self, part: CellPart) -> str:
        """Return the statement as every rank runs it; lines that have no such form are problems of the part."""
        assert part.plain is not None
        text = part.plain.text
        tree, edits = ast.parse(text), Edits(text)
        for node in ast.walk(tree):
            try:
                self._replace(node, edits)
            except NotPlain as error:
                part.plain.refuse(node.lineno, *error.args)  # type: ignore[attr-defined]
        done = edits.result()
        if self._modules & names_of(done).used and not part.plain.problems:
            part.plain.refuse(1, "meshbook", INSTEAD)
        return done

    def _replace(self, node: ast.AST, edits: Edits) -> None:
        """Raises: NotPlain."""
        function = self._function(node.func) if isinstance(node, ast.Call) else ""
        match node:
            case ast.Call() if ast.unparse(node.func).rpartition(".")[2] in WRONG and "sum" not in ast.unparse(node):
                instead = "write the mean of the differences out, as (a - b).square().mean()"
                raise NotPlain(f"the gradient of {ast.unparse(node.func)} is another for DTensors", instead)
            case ast.Import(names=aliases) if any(each.name == "meshbook" for each in aliases):
                rest = [ast.unparse(each) for each in aliases if each.name != "meshbook"]
                edits.replace(node, f"import {', '.join(rest)}" if rest else "")
            case ast.ImportFrom(module="meshbook" | "meshbook.distributed"):
                edits.replace(node, "")
            case ast.FunctionDef(decorator_list=decorators):
                for each in decorators:
                    if self._function(each.func if isinstance(each, ast.Call) else each) == "compile":
                        edits.remove_line(each)
            case ast.Assign(targets=[ast.Name(id=name)], value=ast.Call() as call) if (
                self._function(call.func) == "Mesh"
            ):
                arguments = {each.arg: each.value for each in call.keywords}
                self._axes[name] = tuple(ast.literal_eval(arguments.get("mesh_dim_names", ast.Tuple([], ast.Load()))))
            case ast.Call(func=ast.Name(id="print")):
                edits.replace(node.func, "print_once")
            case ast.Call(func=ast.Attribute(value=value, attr=("item" | "tolist" | "numpy")), args=[]):
                edits.replace(value, f"whole({edits.text_of(value)})")
            case ast.Call(func=ast.Name(id=("float" | "int" | "bool")), args=[value]) | ast.FormattedValue(value=value):
                names, text = {each.id for each in ast.walk(value) if isinstance(each, ast.Name)}, edits.text_of(value)
                if self._on_mesh & names and "(" not in text:
                    edits.replace(value, f"whole({text})")
            case ast.Call() if function in KNOWN:
                edits.replace(node, self._call(function, node, edits))
            case ast.Call() if function in OTHERS:
                raise NotPlain(f"{ast.unparse(node.func)}()", INSTEAD)
            case ast.Call(func=ast.Attribute(value=ast.Name(id=owner), attr=name)):
                if name in REACHING and owner in {*self._on_mesh, "procs"}:
                    raise NotPlain(f"{owner}.{name}()", INSTEAD)

    def _call(self, name: str, node: ast.Call, edits: Edits) -> str:
        """Return the call of torch for one of meshbook. Raises: NotPlain."""
        given = [edits.text_of(each) for each in node.args]
        named = {each.arg or "": each.value for each in node.keywords}
        text = {key: edits.text_of(value) for key, value in named.items()}
        if name == "compile":
            return given[0]
        if name == "Mesh":
            if given or not {"shape", "mesh_dim_names"} <= named.keys():
                raise NotPlain("Mesh of processes", "write Mesh(shape=..., mesh_dim_names=...)")
            return f"init_device_mesh(device.type, {text['shape']}, mesh_dim_names={text['mesh_dim_names']})"
        if name == "module_to_mesh":
            if len(given) != 2 or named:
                raise NotPlain("module_to_mesh with a plan", "use parallelize_module of torch in a %%mesh cell")
            return f"distribute_module({', '.join(given)})"
        if name == "distribute":
            names = dict(zip(("tensor", "mesh", "sharding_spec"), node.args, strict=False)) | named
            placements = self._placements(names, edits)
            return f"distribute_tensor({edits.text_of(names['tensor'])}, {edits.text_of(names['mesh'])}, {placements})"
        placements = self._placements(named, edits)
        others = [f"{key}={value}" for key, value in text.items() if key not in ("mesh", "sharding_spec", "placements")]
        mesh = f"device_mesh={text.get('mesh', 'mesh')}"
        return f"torch.distributed.tensor.{name}({', '.join([*given, *others, mesh, f'placements={placements}'])})"

    def _placements(self, named: dict[str, ast.expr], edits: Edits) -> str:
        """Return the placements that a layout means, as Python. Raises: NotPlain."""
        if "placements" in named:
            return edits.text_of(named["placements"])
        mesh = named.get("mesh")
        axes = self._axes.get(mesh.id, ()) if isinstance(mesh, ast.Name) else ()
        try:
            spec = ast.literal_eval(named.get("sharding_spec", ast.List([], ast.Load())))
        except ValueError:
            spec = None
        if not axes or spec is None:
            raise NotPlain("a layout that is not written out", "give placements=[Shard(0), ...], one for each axis")
        dims = {axis: dim for dim, of in enumerate(spec) for axis in (of if isinstance(of, tuple | list) else (of,))}
        return f"[{', '.join(f'Shard({dims[axis]})' if axis in dims else 'Replicate()' for axis in axes)}]"
