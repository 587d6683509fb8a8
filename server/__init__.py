"""The coordinator: it holds federations, rounds, weights and offsets, and never sees a training image."""
