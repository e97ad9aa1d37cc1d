"""torch.profiler on ranks, and one merged trace."""
