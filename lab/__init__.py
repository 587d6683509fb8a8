"""Federations on one machine, running the code of the coordinator and the agents."""
