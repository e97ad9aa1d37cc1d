"""Operations on their way to the ranks, until it is known what became of them."""
