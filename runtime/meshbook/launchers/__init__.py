"""Who starts host agents, behind one protocol."""
