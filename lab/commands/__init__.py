"""The command line, one module per subject. Heavy imports are local to the commands, so that `--help` is fast."""
