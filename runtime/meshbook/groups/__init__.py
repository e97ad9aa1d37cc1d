"""torch.distributed on a rank: groups that can be aborted and formed again, progress, proofs of deadlock."""
