"""Measurements by clients: stored (evaluations), pooled, read by round (history), and shown (reports, CSV)."""
