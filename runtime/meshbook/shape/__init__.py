"""Extents, slices and views of ranks, and values by rank. Pure."""

from __future__ import annotations

from meshbook.shape.extent import Choice, Extent, Index, Point
from meshbook.shape.members import Members, Picked, Piece, Region, arrange

__all__ = ["Choice", "Extent", "Index", "Members", "Picked", "Piece", "Point", "Region", "arrange"]
