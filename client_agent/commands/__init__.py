"""The command line, one module per subject. Heavy imports are inside the commands, so that `--help` is fast."""
