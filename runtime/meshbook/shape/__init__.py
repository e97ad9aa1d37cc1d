"""Extents, slices and views of ranks, and values by rank. Pure."""

from __future__ import annotations

from meshbook.shape.extent import Extent, Point
from meshbook.shape.indexing import Choice, Index
from meshbook.shape.members import Members, Picked, Region, arrange
from meshbook.shape.slices import Piece

__all__ = ["Choice", "Extent", "Index", "Members", "Picked", "Piece", "Point", "Region", "arrange"]
