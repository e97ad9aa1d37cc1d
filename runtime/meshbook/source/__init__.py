"""What code is called: cells, files, frames."""
