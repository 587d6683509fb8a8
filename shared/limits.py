"""Numbers that both sides keep to, so that sums over any number of clients stay exact; see shared/summation.py."""

MAX_WEIGHT = 2**28  # weight × a 24-bit mantissa stays exact in float64
MAX_ABSOLUTE = 2.0**900  # past this the grids of the exact sum would leave float64's range
MAX_INTEGER = 2**40
