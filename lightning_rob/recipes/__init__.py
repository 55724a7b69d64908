"""Recipes and plug-ins: found by name, read, expanded, and refused unless trusted."""
