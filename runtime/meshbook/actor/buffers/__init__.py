"""Buffers: memory of one process that others read and write without its part."""
