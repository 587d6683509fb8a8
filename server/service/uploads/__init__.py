"""Incoming updates, sent in one request or in several, and validated before they count."""
