"""Coordinators that the tests of a module share, and a federation of two sites without HTTP."""

from collections.abc import Iterator

import pytest
from support.api import Api, SocketApi, open_api
from support.databases import KINDS, new_database
from support.desk import Desk, fedavg_plan
from support.uploads import Sites

from server.store.database import Database

MAX_JSON_BYTES = 20_000


@pytest.fixture(scope="module", params=KINDS)
def api(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Api]:
    """Run one coordinator for the whole module."""
    url = new_database(request.param, request, tmp_path_factory.mktemp("api"))
    with open_api(url, max_json_bytes=MAX_JSON_BYTES) as running:
        yield running


@pytest.fixture(scope="module", params=KINDS)
def socket_api(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[SocketApi]:
    """Run one coordinator behind a real socket for the whole module."""
    with SocketApi(new_database(request.param, request, tmp_path_factory.mktemp("api"))) as running:
        yield running


@pytest.fixture
def desk(clean_db: Database) -> Desk:
    """Create a federation that waits for two sites."""
    return Desk(clean_db, fedavg_plan(min_clients=2, upload_idle_s=60, upload_grace_s=600, quorum=0.5))


@pytest.fixture
def sites(desk: Desk) -> Sites:
    """North and south, both participants of round 1."""
    return desk.join("north"), desk.join("south")
