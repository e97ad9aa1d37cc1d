"""The state of a notebook: its session, targets, options, setup cells, errors."""
