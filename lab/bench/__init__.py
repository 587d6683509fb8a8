"""`distrans-lab bench`: speed as ratios within one run."""
