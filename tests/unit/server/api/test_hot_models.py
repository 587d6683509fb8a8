"""Models are read once for all that download them, and take up a bounded amount of memory."""

import asyncio
from pathlib import Path

import pytest

from server.api.hot_models import HotModels
from server.core.errors import Gone
from server.store import blobs
from server.store.database import Database
from server.store.schema import upgrade


@pytest.fixture
def db(tmp_path: Path) -> Database:
    db = Database(f"sqlite:///{tmp_path / 'models.db'}")
    upgrade(db)
    return db


def test_those_who_come_together_share_one_read(db: Database) -> None:
    blob_id = blobs.store(db, b"a model")

    async def download() -> list[bytes | None]:
        models = HotModels(db)
        return await asyncio.gather(*[models.get(blob_id, 7) for _ in range(5)])

    first, *others = asyncio.run(download())
    assert first == b"a model"
    assert all(other is first for other in others)


def test_more_than_fits_is_forgotten_and_too_much_is_not_kept(db: Database) -> None:
    ids = [blobs.store(db, b"x" * 40) for _ in range(3)]

    async def download() -> tuple[bool, bool]:
        models = HotModels(db, max_bytes=100)
        assert await models.get(blobs.store(db, b"x" * 101), 101) is None
        first = await models.get(ids[0], 40)
        second = await models.get(ids[1], 40)
        await models.get(ids[2], 40)  # takes the place of the first
        return await models.get(ids[1], 40) is second, await models.get(ids[0], 40) is first

    assert asyncio.run(download()) == (True, False)


def test_a_failed_read_is_repeated(db: Database) -> None:
    blob_id = "0" * 32

    async def download() -> bytes | None:
        models = HotModels(db)
        with pytest.raises(Gone):
            await models.get(blob_id, 5)
        with db.write() as session:
            blobs.begin_blob(session, blob_id)
        return await models.get(blob_id, 5)

    assert asyncio.run(download()) == b""
