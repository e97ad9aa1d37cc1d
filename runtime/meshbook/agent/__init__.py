"""The host agent's process: it starts, watches and reaps workers, and forwards calls, output and payloads."""
