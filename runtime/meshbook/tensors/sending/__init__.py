"""Operations on their way to the ranks, until it is known whether they were done."""
