"""The client agent: the program that a participating site runs."""
