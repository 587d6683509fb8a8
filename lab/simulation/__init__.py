"""Federations in memory, running the same method code as the programs."""
