"""One function per use case: load, decide in the core, save. Each transaction is short; long work takes several."""
