"""Offers of the operating system and the drivers: processes, exits, devices, folders, files in memory."""
