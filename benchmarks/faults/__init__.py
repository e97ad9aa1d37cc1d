"""Faults on purpose: what a mesh under load makes of deaths, interrupts, cut links and floods. See `__main__`."""
