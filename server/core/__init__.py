"""Pure decisions: no HTTP, no SQL, no clock, and no randomness except from a given seed."""
