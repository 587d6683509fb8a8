"""Whole federations on one machine, through the code that the coordinator and the agents run."""
