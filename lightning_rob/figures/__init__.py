"""Figures, each a function of numbers that returns a matplotlib Figure; no global state."""
