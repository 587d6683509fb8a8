"""The command line, one module per subject. Heavy imports are local to the commands: `--help` answers at once."""
