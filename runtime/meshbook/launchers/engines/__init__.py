"""The conversation with engines: their commands and queues, drivers of ours beside us, and their logs."""
