"""Cells that run beside the notebook: jobs, wait, cancel; and interrupt for all that runs."""

from __future__ import annotations

from meshbook_extension.cells import wait_for
from meshbook_extension.commands import command
from meshbook_extension.failure_view import INTERRUPT
from meshbook_extension.options import Arguments, Grammar, Option
from meshbook_extension.running_cell import STILL_RUNNING_S
from meshbook_extension.session import Session
from meshbook.wording import name_ranks
