"""One function a use case: load, decide in the core, save, in one transaction."""
