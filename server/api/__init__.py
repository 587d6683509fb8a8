"""Thin routers (HTTP in, a use case, HTTP out) and the dependencies they share."""
