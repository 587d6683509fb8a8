"""Fixtures for all tests."""

import pytest
import torch
from hypothesis import HealthCheck, settings

settings.register_profile("project", deadline=None, suppress_health_check=[HealthCheck.too_slow], derandomize=True)
settings.load_profile("project")


torch.set_num_threads(1)  # small networks: more threads only get into each other's way


@pytest.fixture(autouse=True)
def _seeded_torch() -> None:
    torch.manual_seed(0)


pytest_plugins = ["support.databases", "support.objects"]
