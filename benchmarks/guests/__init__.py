"""Programs of others as guests: unchanged by torchrun and on a living mesh, beside each other."""
