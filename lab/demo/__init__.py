"""`distrans-lab demo`: a federation of real processes on one machine."""
