"""Generators for the documentation site: error codes, API reference, and the build itself."""
