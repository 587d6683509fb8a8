"""Networks, offsets, training and evaluation. Importing this package alone loads nothing heavy."""
