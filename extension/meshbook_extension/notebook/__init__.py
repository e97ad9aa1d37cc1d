"""What the notebook knows: its session, targets, options, setup cells, errors."""
