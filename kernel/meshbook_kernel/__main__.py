"""``python -m meshbook_kernel -f CONNECTION_FILE`` runs the kernel; ``... install`` is ``meshbook kernel install``."""

from __future__ import annotations

import gc
import sys

NEEDED = (6, 29)


def main() -> int:
    """Run the command line; returns the exit code."""
    if sys.argv[1:2] == ["install"]:
        from meshbook.cli import main as run_command

        return run_command(["kernel", *sys.argv[1:]])

    gc.disable()  # until the kernel starts: importing makes little garbage
    from ipykernel._version import __version__, version_info

    if version_info[:2] < NEEDED:
        print(
            f"The Meshbook kernel needs ipykernel {NEEDED[0]}.{NEEDED[1]} or newer; this is {__version__}. "
            "Update ipykernel, or use %load_ext meshbook in the kernel that you have.",
            file=sys.stderr,
        )
        return 1

    from ipykernel.kernelapp import IPKernelApp

    from meshbook_kernel.kernel import MeshbookKernel

    IPKernelApp.launch_instance(kernel_class=MeshbookKernel)
    return 0


if __name__ == "__main__":
    sys.exit(main())
