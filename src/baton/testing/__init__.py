"""Placeholder docstring: the owner writes it."""
