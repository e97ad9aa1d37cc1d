"""What goes into a reply. Apart from those who make them, so that the notebook need not import torch for it."""

from __future__ import annotations

from typing import NamedTuple

from meshbook.errors import Failure
from meshbook.pickling import Pickled


class Answer(NamedTuple):
    """A value, or a failure."""

    status: int
    value: object = None
    has_value: bool = False
    failure: Failure | None = None
    pickled: Pickled | None = None
    """The value's pickle, where it is known already."""
    what: str = "the result"
    """How an error names the value that cannot travel."""
