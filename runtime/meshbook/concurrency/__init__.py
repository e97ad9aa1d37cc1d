"""Futures, background threads, forks, and interrupts of threads and coroutines."""
