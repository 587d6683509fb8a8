"""The coordinator's pages: what runs, who is late, whether it pays off, and what operators do about it.

Pages show what services return and act through the same use cases as the API.
"""
