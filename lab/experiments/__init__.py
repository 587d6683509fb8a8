"""Experiments: many federations from one file, with results, reports and figures."""

from typing import Literal

Scale = Literal["full", "small"]
EngineName = Literal["sequential", "processes", "ray"]
