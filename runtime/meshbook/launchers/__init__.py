"""The launchers, which start host agents behind one protocol."""
