"""Workers that were asked for and wait for the template that they are forked from, and those templates."""

from __future__ import annotations

import contextlib
import functools
import os
import sys
from collections.abc import Callable, Sequence
from typing import NamedTuple

import msgspec

from meshbook.agent.mesh import AgentMesh
from meshbook.agent.template import TemplateProcess
from meshbook.launchers.templates import WITH_TORCH, StartedTemplate
from meshbook.system.event_loop import EventLoop
from meshbook.system.os_errors import explain
from meshbook.system.processes import count_moves, kill_strays
from meshbook.wire import messages as wire

TELL_S = 1.0  # how often the controller is told why workers that come up wait


class _Interpreter(NamedTuple):
    """The interpreter of a template. path: empty for ours. mesh: the one that it serves alone; 0: all that name it."""

    path: str = ""
    mesh: int = 0


_OURS = _Interpreter()


class _Starting(NamedTuple):
    """A request whose workers have not come up."""

    spawn: wire.Spawn
    mesh: AgentMesh
    template: TemplateProcess
    told: tuple[object, ...] = ()  # the state in the last report to the controller


class Spawns:
    """The requests for workers of one agent, and their templates. mesh_of: the mesh of a request, made where there is
    none. report: sends to the controller. inherited: the first template."""

    def __init__(
        self,
        loop: EventLoop,
        mesh_of: Callable[[wire.Spawn], AgentMesh],
        report: Callable[[wire.FromHost], None],
        inherited: StartedTemplate | None,
    ) -> None:
        self._loop, self._mesh_of, self._report = loop, mesh_of, report
        # by interpreter, with torch and without, and by the modules that they have imported besides
        self._templates: dict[tuple[_Interpreter, bool, tuple[str, ...]], TemplateProcess] = {}
        self._waiting: list[wire.Spawn] = []
        self._starting: list[_Starting] = []
        self._was_asked = False
        if inherited is not None:
            self._templates[_OURS, inherited.has_torch, ()] = TemplateProcess.start(loop, inherited)

    @property
    def template_pids(self) -> set[int]:
        return {template.pid for template in self._templates.values()}

    def start(self, spawn: wire.Spawn, again: bool = False) -> None:
        """Start workers, once their template is ready. again: it is the second one, since the first has ended."""
        self._was_asked = True
        if spawn.must_enter and spawn.cwd is not None:
            there = os.path.expanduser(spawn.cwd)  # ``~`` is another folder on each host
            if not os.path.isdir(there) or not os.access(there, os.X_OK):
                self._fail(spawn, f"there is no folder {os.fsdecode(there)} that it could enter")
                return
            sys_path = tuple(there if entry == spawn.cwd else entry for entry in spawn.sys_path)
            spawn = msgspec.structs.replace(spawn, cwd=there, sys_path=sys_path)
        try:
            template = self._template_for(spawn)
        except OSError as error:
            its = f" with {spawn.command.python}" if spawn.command.python else ""
            self._fail(spawn, f"the workers' template could not be started{its}: {explain(error)}")
            return
        mesh = self._mesh_of(spawn)
        mesh.memory.on_spawn(spawn)
        self._waiting.append(spawn)
        if not self._starting:
            self._loop.call_later(TELL_S / 2, self._tell)  # so that who looks after a second is told what it is
        self._starting = [
            *(each for each in self._starting if each.spawn is not spawn),
            _Starting(spawn, mesh, template),
        ]
        template.when_ready(lambda: self._fork(spawn, mesh, template, again))

    def _template_for(self, spawn: wire.Spawn) -> TemplateProcess:
        """Return the template of a request: the plain one if that with its modules must not be forked. A template that
        has ended is replaced. Raises: OSError if the system has no process or no descriptors for it."""
        command, python = spawn.command, _OURS
        if command.python not in ("", sys.executable):
            python = _Interpreter(command.python, spawn.mesh if command.anew else 0)
        plain = self._plain_template(python, spawn.torch)
        if not spawn.preload:
            return plain
        key = python, spawn.torch, spawn.preload
        template = self._templates.get(key)
        if template is None or template.failure:
            template = self._templates[key] = plain.fork_template(spawn.preload, spawn.sys_path)
        return plain if template.problem else template

    def expect_torch(self) -> None:
        """Have torch imported before ranks are asked for, unless some were: they may want none."""
        if not self._was_asked:
            with contextlib.suppress(OSError):  # who asks is told
                self._plain_template(_OURS, torch=True)

    def _plain_template(self, python: _Interpreter, torch: bool) -> TemplateProcess:
        """Return the template without modules. Raises: OSError."""
        template = self._templates.get((python, torch, ()))
        if template is None or template.failure:
            if torch:
                template = self._plain_template(python, torch=False).fork_template(WITH_TORCH, ())
            else:
                template = TemplateProcess.start(self._loop, python=python.path)
            self._templates[python, torch, ()] = template
        return template

    def _fork(self, spawn: wire.Spawn, mesh: AgentMesh, template: TemplateProcess, again: bool) -> None:
        if spawn not in self._waiting:
            return  # stopped before it began
        self._waiting.remove(spawn)
        if template.failure:
            self._fail(spawn, f"the workers' template failed:\n{template.failure}")
            return
        is_plain = any(template is each for (*_, modules), each in self._templates.items() if not modules)
        if template.problem and not is_plain:
            self.start(spawn, again)  # from the plain one
        else:
            in_workers = bool(spawn.preload) and is_plain
            retry = None if again else functools.partial(self.start, spawn, again=True)
            mesh.worker_pool.start(spawn, template, in_workers, retry)

    def _tell(self) -> None:
        """Report once a second why workers that come up wait, if that has changed."""
        told = []
        for each in self._starting:
            workers, is_waiting = each.mesh.worker_pool.starting(each.spawn), each.spawn in self._waiting
            if not workers and not is_waiting:
                continue
            count = len(each.spawn.seats)
            answers = f"starting ranks, {count - len(workers)} of {count} have answered"
            step = self._import_of(each) if is_waiting else answers
            pids = self.template_pids if is_waiting else {worker.pid for worker in workers}
            line = each.template.voice.last_line
            found = step, count_moves(pids), line
            if found != each.told:
                self._report(wire.SpawnProgress(each.spawn.mesh, each.spawn.request, step, line))
            told.append(each._replace(told=found))
        self._starting = told
        if told:
            self._loop.call_later(TELL_S, self._tell)

    def _import_of(self, starting: _Starting) -> str:
        """Return the import that its template of workers is at now, in words."""
        spawn, templates = starting.spawn, self._templates.items()
        if spawn.preload and any(each.ready.done() for (_, *key), each in templates if key == [spawn.torch, ()]):
            return f"importing {', '.join(spawn.preload)}"
        return "importing torch" if spawn.torch else "starting Python"

    def _fail(self, spawn: wire.Spawn, reason: str) -> None:
        self._report(wire.SpawnFailed(spawn.mesh, reason, request=spawn.request))

    def give_up(self, mesh: int, ranks: Sequence[int] | None = None) -> None:
        """Drop requests that still wait for a template, for some workers of a mesh or for all."""
        for spawn in tuple(self._waiting):
            if spawn.mesh == mesh and (ranks is None or any(seat.known_as in ranks for seat in spawn.seats)):
                self._waiting.remove(spawn)

    def forget(self, mesh: int) -> None:
        """Close the templates that a mesh, which has ended, had for itself."""
        for key in [key for key in self._templates if key[0].mesh == mesh]:
            self._templates.pop(key).close()

    def end_strays(self) -> None:
        """End processes that ranks have left in sessions of their own; the last mesh has ended."""
        if all(template.pid or template.failure for template in self._templates.values()):
            kill_strays(self.template_pids)

    def close(self) -> None:
        for template in self._templates.values():
            template.close()
        kill_strays(())
