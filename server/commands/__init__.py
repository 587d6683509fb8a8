"""The commands of `distrans-server`, one module per noun. Slow imports go inside functions, to keep `--help` fast."""
