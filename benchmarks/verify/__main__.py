"""`python -m benchmarks.verify`: show on one GPU what holds there, within ten minutes, and write docs/verified.md.

Each step runs in a process of its own and has a deadline; the page is written after each, so what was found is kept
when the command is ended. Ends with 0 when no step failed or hung, with 1 when one did, with 2 where it cannot run.
"""

from __future__ import annotations

import argparse
import importlib.util
import os
import shlex
import signal
import sys
import tempfile
import time
from pathlib import Path

PACKAGES = {
    "torch": "torch", "numpy": "numpy", "IPython": "ipython", "msgspec": "msgspec", "cloudpickle": "cloudpickle",
    "zmq": "pyzmq", "typing_extensions": "typing_extensions",
}  # fmt: skip
"""What must be importable, by the names under which they are installed. Nothing else of .venv is needed."""
WITHIN_S = 560.0  # all steps together; what is under way then has some seconds to be ended


def main(argv: list[str] | None = None) -> int:
    """Run from the command line."""
    if missing := [name for module, name in PACKAGES.items() if importlib.util.find_spec(module) is None]:
        print(f"{sys.executable} has no {', '.join(missing)}: install them there, or name another: "
              "make verify-gpu VERIFY_PYTHON=/path/to/python", file=sys.stderr)  # fmt: skip
        return 2
    if importlib.util.find_spec("meshbook") is None:
        print("meshbook is not on the path; `make verify-gpu` puts it there", file=sys.stderr)
        return 2
    begun = time.monotonic()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that the step under way is ended, too
    options = _parse(argv)
    from benchmarks.verify import page, steps  # these need the packages

    if refusal := _refusal(options.device):
        print(refusal, file=sys.stderr)
        return 2
    if options.step:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        return steps.run_here(options.step, options.device)
    chosen = options.only.split(",") if options.only else [step.name for step in steps.STEPS]
    if unknown := [name for name in chosen if name not in {step.name for step in steps.STEPS}]:
        print(
            f"no step is called {unknown[0]}; there are {', '.join(step.name for step in steps.STEPS)}", file=sys.stderr
        )
        return 2
    command = f"python -m benchmarks.verify {shlex.join(sys.argv[1:] if argv is None else argv)}".strip()
    logs = Path(tempfile.mkdtemp(prefix="meshbook-verify-") if options.logs is None else options.logs)
    logs.mkdir(parents=True, exist_ok=True)
    facts, outcomes = page.facts_of(options.device, options.commit), dict[str, steps.Outcome]()
    print("\n".join(f"{what}: {fact}" for what, fact in facts.items()) + f"\nlogs: {logs}\n", flush=True)

    def on_outcome(step: steps.Step, outcome: steps.Outcome) -> None:
        outcomes[step.name] = outcome
        result, seconds, note = page.cells(outcome)
        print(f"{step.what:<46}  {result:<7}  {seconds:>5}  {note}", flush=True)
        for figure in outcome.figures:
            print("    " + "  ".join(figure[:4]), flush=True)
        if options.write:
            page.write(options.write, options.device, facts, outcomes, command)

    left_s = options.within - (time.monotonic() - begun)
    steps.run_all(chosen, options.device, left_s, logs, on_outcome, options.patience)
    print(f"\n{page.tally(outcomes)}; {time.monotonic() - begun:.0f} s")
    return 1 if any(outcome.is_bad for outcome in outcomes.values()) else 0


def _refusal(device: str) -> str:
    """Return why the steps cannot run on this device; empty when they can."""
    import torch

    from meshbook.system.devices import count_cuda_devices

    elsewhere = 'Run this on a machine with one, or the same steps over gloo: make verify-gpu ARGS="--device cpu"'
    if device == "cuda" and not count_cuda_devices():
        return f"There is no CUDA device here. {elsewhere}"
    if device == "cuda" and torch.version.cuda is None:
        return f"torch {torch.__version__} of {sys.executable} is built without CUDA. Name another by VERIFY_PYTHON=."
    return ""


def _parse(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.verify", description=__doc__)
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda", help="cpu: the same steps over gloo")
    parser.add_argument("--only", default="", metavar="NAME,...", help="these steps alone")
    parser.add_argument("--within", type=float, default=WITHIN_S, metavar="SECONDS", help="for all steps together")
    parser.add_argument("--patience", type=float, default=1, metavar="TIMES", help="all limits of steps times this")
    parser.add_argument("--write", type=Path, metavar="FILE", help="put the device's section into this page")
    parser.add_argument("--logs", type=Path, metavar="DIR", help="what each step printed; a new folder by default")
    parser.add_argument("--commit", default=os.environ.get("VERIFY_COMMIT", ""), help="where the files have no .git")
    parser.add_argument("--step", metavar="NAME", help="run one step in this process and print what it tells")
    return parser.parse_args(argv)


if __name__ == "__main__":
    sys.exit(main())
