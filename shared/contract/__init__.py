"""The contract between coordinators and agents: plans, messages, limits, errors. Imports neither torch nor numpy."""
