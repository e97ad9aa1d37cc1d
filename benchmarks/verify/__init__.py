"""What holds on a device: `make verify-gpu` runs it on a GPU and writes docs/verified.md. See `__main__`."""
