"""The mesh in a notebook: ``%load_ext meshbook`` gives ``%mesh`` and ``%%mesh`` to any IPython.

It works in a stock ipykernel, in a terminal, and is loaded already in the Meshbook kernel. Nothing heavy is imported
before the first spawn.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, cast

if TYPE_CHECKING:
    from IPython.core.interactiveshell import InteractiveShell

    from meshbook.mesh.proc_mesh import ProcMesh
    from meshbook_extension.widget.health import HealthWidget

_SESSION = "_meshbook_session"
"""The shell's attribute that has the session, so that its meshes outlast ``%reload_ext``."""


def load_ipython_extension(shell: InteractiveShell) -> None:
    """Register the magics. Loading twice changes nothing; meshes of an earlier load are still there."""
    from meshbook_extension.cells.elastic_loops import ElasticLoops
    from meshbook_extension.cells.transformers import TRANSFORMERS
    from meshbook_extension.wiring import MeshMagics, open_session

    if is_loaded(shell):
        return
    session = open_session(shell, getattr(shell, _SESSION, None))
    setattr(shell, _SESSION, session)
    MeshMagics(shell, session).register()
    shell.input_transformers_cleanup.extend(TRANSFORMERS)
    shell.ast_transformers.append(ElasticLoops())


def unload_ipython_extension(shell: InteractiveShell) -> None:
    """Remove the magics. Meshes run on until they are stopped in Python, or the process ends."""
    from meshbook_extension.cells.elastic_loops import ElasticLoops
    from meshbook_extension.cells.transformers import TRANSFORMERS, AutoMode

    if not is_loaded(shell):
        return
    AutoMode.of(shell).switch_off()
    for transformer in TRANSFORMERS:
        shell.input_transformers_cleanup.remove(transformer)
    shell.ast_transformers[:] = [each for each in shell.ast_transformers if not isinstance(each, ElasticLoops)]
    for kind in ("line", "cell"):
        shell.magics_manager.magics[kind].pop("mesh", None)
    getattr(shell, _SESSION).closing.close()


def is_loaded(shell: InteractiveShell) -> bool:
    """Whether ``%mesh`` is registered, and ours."""
    magic = shell.magics_manager.magics["line"].get("mesh")
    return type(getattr(magic, "__self__", None)).__name__ == "MeshMagics"


def health_widget(procs: ProcMesh) -> HealthWidget:
    """Return the widget of ``%mesh``, for places without our magics: ``mo.ui.anywidget(health_widget(mesh))``.

    Needs anywidget. It is live while it can be seen; buttons act as soon as the place passes their messages on.
    """
    from meshbook_extension.notebook.session import Session
    from meshbook_extension.widget.health import HealthWidget
    from meshbook_extension.widget.mesh_source import MeshSource

    source = MeshSource(Session(cast("InteractiveShell", None)), procs)
    widget = HealthWidget(source)
    widget.refresh(source.snapshot())
    return widget
