"""Image sets for experiments, read from their published layouts and split over simulated clients."""
