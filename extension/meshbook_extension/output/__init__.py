"""Output of ranks: merged, bounded, labelled, published."""
