"""One-sided buffers: memory of one process that others read and write."""
