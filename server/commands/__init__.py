"""The commands of `distrans-server`, by noun. Heavy imports stand inside them, so that `--help` answers at once."""
