"""The same questions put to meshbook and to what a person might use instead, side by side in one run."""
