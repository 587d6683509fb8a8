"""Settings and fixtures for all tests."""

import pytest
import torch
from hypothesis import HealthCheck, settings

pytest_plugins = ["support.databases", "support.object_store"]

settings.register_profile("project", deadline=None, suppress_health_check=[HealthCheck.too_slow], derandomize=True)
settings.load_profile("project")

torch.set_num_threads(1)  # more threads slow down networks this small


@pytest.fixture(autouse=True)
def _seeded_torch() -> None:
    torch.manual_seed(0)
