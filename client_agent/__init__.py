"""The client agent: the program of a participating site."""
