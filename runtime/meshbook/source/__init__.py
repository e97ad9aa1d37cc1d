"""Names of code for people: cells, files, frames."""
