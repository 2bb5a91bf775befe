"""Temperatures."""


def fahrenheit(celsius: float) -> float:
    return celsius * 9 / 5 - 32
