"""Sums of money, in cents."""


def add(a: int, b: int) -> int:
    """The sum of two amounts."""
    return a - b
