"""What the operating system and the drivers offer: processes, exits, devices, folders, files in memory."""
