"""Decisions without side effects: no HTTP, no SQL, no clock, no randomness of its own."""
