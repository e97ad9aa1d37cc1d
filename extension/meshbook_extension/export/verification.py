"""The proof of a script: its cells run on a fresh mesh, then the script by torchrun; prints and values must be equal.

    this process      starts both, one after the other, ends them, compares
    replay            python -m meshbook_extension.export.verification FOLDER: a session of its own, with the mesh
    torchrun          a copy of the script, which keeps its last values too

Each rank writes its last tensors and numbers to ``values-RANK.pt``. Prints are the output of the cells on the fresh
mesh, and torchrun's log of the rank.
"""

from __future__ import annotations

import contextlib
import io
import os
import re
import signal
import subprocess
import sys
import tempfile
import threading
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec

from meshbook.errors import UsageError
from meshbook.formatting import format_duration, name_ranks
from meshbook_extension.export.program import CellPart, RecordedProgram
from meshbook_extension.export.top import END
from meshbook_extension.output.labels import count

END_S = 20.0
"""The time that a process has to end its own before it is killed."""
SHOWN = 5
"""The most differences that are told."""
TOLERANCE = 1e-5
"""The relative difference of numbers that sums in another order may have."""
LARGE = 1e3
"""The numbers from which on the difference does not grow: the time of day of one run is not that of the other."""
_NUMBER = re.compile(r"[-+]?(?:\d+\.\d*|\.\d+|\d+)(?:e[-+]?\d+)?")
_NOTICE = re.compile(r"^init_process_group: .*; nothing to do\n", re.MULTILINE)
_PROMPT = re.compile(r"^(?:Out\[\d+\]: \n?|on mesh \"verify\".*\n)", re.MULTILINE)
_ADDRESS = re.compile(r"(?<=0x)[0-9a-f]{6,}|(?<=':\d)/\d+|(?<=':\d\d)/\d+")
"""The addresses in texts, and the sizes that a `Point` shows behind its coordinates."""
KEEP = """
def _keep_values(folder, rank, names, whole):
    import torch

    def local(value):
        if hasattr(value, "full_tensor"):
            value = value.full_tensor() if whole else value.to_local()
        return value.detach().cpu().clone()

    found = {}
    for name, value in list(names.items()):
        if name.startswith(("_", "local_")) or name in ("rank", "local_rank", "world_size"):
            continue
        if isinstance(value, torch.Tensor):
            found[name] = local(value)
        elif isinstance(value, torch.nn.Module):
            state = value.state_dict().items()
            found.update({f"{name}.{key}": local(each) for key, each in state if isinstance(each, torch.Tensor)})
        elif type(value) in (bool, int, float, complex, str):
            found[name] = value
        elif type(value) in (list, tuple) and value and all(type(each) in (bool, int, float) for each in value):
            found[name] = list(value)
    torch.save(found, f"{folder}/values-{rank}.pt")
"""
"""The function by which a rank, in either run, keeps its last values."""


class Step(msgspec.Struct):
    """A part of a program for the fresh mesh: a cell of ranks, a statement of the notebook, or a command."""

    kind: str
    source: str
    number: int
    lines_above: int
    ranks: tuple[int, ...]
    axes: dict[str, int]
    """The axes of the mesh by then; empty for a statement."""
    is_shown: bool
    """Whether the value of a statement of the notebook is shown."""


class ReplayRequest(msgspec.Struct):
    """The work of the process that has the fresh mesh."""

    axes: dict[str, int]
    device: str
    is_whole: bool
    """Whether values are those of mesh tensors in the notebook, the same for all ranks."""
    steps: list[Step]


def verify(program: RecordedProgram, text: str, path: Path, timeout_s: float) -> str:
    """Run both and return a line that says how much is equal.

    timeout_s: of each. Raises: UsageError with the first differences, or the last lines of a run that failed.
    """
    world_size = program.mesh.size
    whole = any(program.tensors.has(part) for part in program.parts if part.kind == "local")
    with tempfile.TemporaryDirectory(prefix="meshbook-export-") as folder:
        mesh, script = Path(folder, "mesh"), Path(folder, "script")
        for each in (mesh, script):
            each.mkdir()
        steps = [_step(part) for part in program.parts if part.source]
        request = ReplayRequest(program.mesh.axes, program.mesh.device, whole, steps)
        Path(mesh, "request").write_bytes(msgspec.json.encode(request))
        _run(
            [sys.executable, "-m", "meshbook_extension.export.verification", str(mesh)],
            mesh,
            "the cells on a fresh mesh",
            timeout_s,
        )
        copy = script / path.name
        keep = f"{KEEP}\n_keep_values({str(script)!r}, dist.get_rank(), globals(), {whole})\n"
        copy.write_text(text.removesuffix(END) + keep + END)
        launch = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", str(world_size)]
        launch += ["--rdzv-backend", "c10d", "--rdzv-endpoint", "127.0.0.1:0", "--log-dir", str(script / "logs")]
        _run(
            [*launch, "--redirects", "3", str(copy)],
            script,
            "the script under torchrun",
            timeout_s,
            path.absolute().parent,
        )
        logs = {int(each.parent.name): each.read_text() for each in script.glob("logs/*/*/*/stdout.log")}
        printed = msgspec.json.decode(Path(mesh, "printed").read_bytes(), type=dict[int, str])
        return _compare(printed, logs, mesh, script, world_size)


def _step(part: CellPart) -> Step:
    ranks, axes = (part.target.ranks, part.target.axes) if part.target else ((), {})
    return Step(part.kind, part.source, part.cell.number, part.line, ranks, axes, part.is_last)


def _run(command: list[str], folder: Path, what: str, timeout_s: float, beside: Path | None = None) -> None:
    """Run a process to its end; it ends with an interrupt, and at its deadline. Raises: UsageError if it fails."""
    environment = {name: value for name, value in os.environ.items() if name not in _OF_RANKS}
    environment |= {"PYTHONUNBUFFERED": "1", "MESHBOOK_LEASE_S": "2", "OMP_NUM_THREADS": "1"}
    paths = [str(beside or os.getcwd()), os.getcwd(), *filter(None, [os.environ.get("PYTHONPATH")])]
    environment["PYTHONPATH"] = os.pathsep.join(paths)
    with open(folder / "log", "wb") as log:
        process = subprocess.Popen(
            command, stdout=log, stderr=log, stdin=subprocess.DEVNULL, env=environment, start_new_session=True
        )
        try:
            code = process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            raise UsageError(f"not verified: {what} took longer than {format_duration(timeout_s)}.") from None
        finally:
            _end(process)
    if code:
        logs = [folder / "log", *sorted(folder.glob("logs/*/*/*/stderr.log"))]
        lines = [line for each in logs for line in each.read_text(errors="replace").strip().splitlines()[-12:]]
        raise UsageError(f"not verified: {what} failed.\n  " + "\n  ".join(lines[-24:]))


def _end(process: subprocess.Popen[bytes]) -> None:
    """End a process and all of its group."""
    if process.poll() is None:
        process.send_signal(signal.SIGTERM)
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(END_S)
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


_OF_RANKS = frozenset({"RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", "JPY_SESSION_NAME"})


# ---- comparison --------------------------------------------------------------------------------------------------


def _compare(printed: dict[int, str], logs: dict[int, str], mesh: Path, script: Path, world_size: int) -> str:
    """Raises: UsageError with the first differences."""
    import torch

    differences: list[str] = []
    lines = values = 0
    for rank in range(world_size):
        before, after = (texts.get(rank, "").splitlines() for texts in (printed, logs))
        lines += len(before)
        if not _is_same_text(" ".join(before), " ".join(after)):
            differences += _different_lines(rank, before, after)
        kept = [torch.load(each / f"values-{rank}.pt", weights_only=True) for each in (mesh, script)]
        values += len(kept[0])
        for name, value in kept[0].items():
            if name not in kept[1]:
                differences.append(f"[{rank}] {name}: the script does not have it")
            elif not _is_same(value, kept[1][name]):
                differences.append(
                    f"[{rank}] {name}: {_brief(value)} on the mesh, {_brief(kept[1][name])} in the script"
                )
    if differences:
        more = f"\n  and {len(differences) - SHOWN} more" if len(differences) > SHOWN else ""
        told = "\n  ".join(differences[:SHOWN])
        raise UsageError(f"not verified: the cells on a fresh mesh and the script differ.\n  {told}{more}")
    where = name_ranks(range(world_size))
    return f"verified: {count(lines, 'printed line')} and {count(values, 'value')} are equal on {where}"


def _different_lines(rank: int, before: list[str], after: list[str]) -> Iterator[str]:
    for at in range(max(len(before), len(after))):
        one, other = (texts[at] if at < len(texts) else "(nothing)" for texts in (before, after))
        if not _is_same_text(one, other):
            yield f"[{rank}] line {at + 1}: {one!r} on the mesh, {other!r} in the script"
            return


def _is_same_text(one: str, other: str) -> bool:
    """Compare texts by their words, and numbers as numbers: a notebook breaks long values into lines."""
    if one == other:
        return True
    texts = [_ADDRESS.sub("", "".join(text.split())) for text in (one, other)]
    if _NUMBER.sub("#", texts[0]) != _NUMBER.sub("#", texts[1]):
        return False
    numbers = [[float(each) for each in _NUMBER.findall(text)] for text in texts]
    return all(map(_is_near, *numbers))


def _is_near(one: float, other: float) -> bool:
    size = min(max(abs(one), abs(other)), LARGE)
    return one == other or abs(one - other) <= TOLERANCE * size or (one != one and other != other)


def _is_same(one: Any, other: Any) -> bool:
    import torch

    if isinstance(one, torch.Tensor) and isinstance(other, torch.Tensor):
        same = (one.shape, one.dtype) == (other.shape, other.dtype)
        return same and (torch.equal(one, other) or torch.allclose(one, other, TOLERANCE, 1e-7, equal_nan=True))
    if type(one) is float and type(other) is float:
        return _is_near(one, other)
    if isinstance(one, list) and isinstance(other, list):
        return len(one) == len(other) and all(map(_is_same, one, other))
    return bool(one == other)


def _brief(value: object) -> str:
    return " ".join(repr(value).split())[:60]


# ---- the process with the fresh mesh -------------------------------------------------------------------------------


def replay(folder: Path) -> None:
    """Run the steps of a request on a mesh of their own, and keep what each rank printed and has at the end."""
    from IPython.core.interactiveshell import InteractiveShell
    from traitlets.config import Config

    import meshbook
    from meshbook.calls.output import DisplayData, OutputEvent, StreamText, without_joins
    from meshbook.mesh.proc_view import arrange_ranks
    from meshbook.mesh.rank_calls import set_axes, start_cell
    from meshbook.mesh.states import await_printed
    from meshbook_extension.notebook.session import Session

    request = msgspec.json.decode(Path(folder, "request").read_bytes(), type=ReplayRequest)
    printed: dict[int, list[str]] = defaultdict(list)

    def listen(event: OutputEvent) -> None:
        if isinstance(event, StreamText) and event.stream == "stdout":
            printed[event.rank].append(without_joins(event.text))
        elif isinstance(event, DisplayData) and not event.update:
            printed[event.rank].append(f"{event.data.get('text/plain', '')}\n")

    config = Config()
    config.HistoryManager.enabled = False
    config.InteractiveShell.colors = "nocolor"
    shell = InteractiveShell(config=config)
    shell.run_line_magic("load_ext", "meshbook_extension")
    session: Session = vars(shell)["_meshbook_session"]
    procs = meshbook.this_host().spawn_procs(request.axes, name="verify", device=request.device)
    session.add(procs)

    def on_ranks(code: str, ranks: tuple[int, ...], number: int = 0, above: int = 0, listener: Any = listen) -> None:
        part = procs if len(ranks) == len(procs) else procs.select(ranks)
        start_cell(part, code, on_output=listener, cell_number=number, line_offset=above).future.result()
        come = threading.Event()
        await_printed(part, come.set, END_S)
        come.wait(END_S)

    for step in request.steps:
        if step.axes and step.axes != session.mesh().sizes:
            view = arrange_ranks(procs, step.axes, procs.ranks)
            set_axes(view).get()
            session.arrange(view)
        if step.kind == "ranks":
            on_ranks(step.source, step.ranks, step.number, step.lines_above)
            continue
        shell.ast_node_interactivity = "last_expr" if step.is_shown and request.is_whole else "none"
        with contextlib.redirect_stdout(io.StringIO()) as shown:
            result = shell.run_cell(step.source, store_history=True)
        if step.kind == "local":
            printed[0].append(_PROMPT.sub("", shown.getvalue()))
        result.raise_error()
    if request.is_whole:
        names: dict[str, Any] = {}
        exec(KEEP, names)
        names["_keep_values"](folder, 0, {**shell.user_ns}, True)
        for rank in range(1, len(procs)):
            Path(folder, f"values-{rank}.pt").write_bytes(Path(folder, "values-0.pt").read_bytes())
    else:
        on_ranks(f"{KEEP}\n_keep_values({str(folder)!r}, rank, globals(), False)", procs.ranks, listener=lambda _: None)
    Path(folder, "printed").write_bytes(
        msgspec.json.encode({rank: _NOTICE.sub("", "".join(each)) for rank, each in printed.items()})
    )


def main() -> None:
    """Be the process with the fresh mesh, which ends with it."""
    import meshbook

    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))
    try:
        replay(Path(sys.argv[1]))
    finally:
        meshbook.shutdown()


if __name__ == "__main__":
    main()
