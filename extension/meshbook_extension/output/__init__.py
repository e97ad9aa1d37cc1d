"""The output of ranks: merged, bounded, labelled, published."""
