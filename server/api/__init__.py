"""Thin routers: HTTP in, a use case, HTTP out."""
