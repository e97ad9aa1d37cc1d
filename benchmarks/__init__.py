"""Code that measures: `python -m benchmarks` against floors, `python -m benchmarks.peers` against others."""
