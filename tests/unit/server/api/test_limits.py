"""How much of each upload is buffered."""

import asyncio
from contextlib import AsyncExitStack

import pytest

from server.api.limits import Limits
from server.service.settings import Settings
from server.store.blobs import CHUNK_BYTES

KIB = 1024


@pytest.mark.parametrize(
    ("uploads", "piece_bytes"),
    [(0, CHUNK_BYTES), (1, CHUNK_BYTES), (16, CHUNK_BYTES), (32, CHUNK_BYTES // 2), (128, 256 * KIB), (900, 256 * KIB)],
)
def test_uploads_share_a_fixed_amount_of_memory(uploads: int, piece_bytes: int) -> None:
    limits = Limits(Settings("sqlite:///unused.db", "an-admin-token-for-tests"))

    async def begin() -> int:
        async with AsyncExitStack() as stack:
            for client in range(uploads):
                await stack.enter_async_context(limits.uploads.hold(client))
            return limits.upload_piece_bytes()

    assert asyncio.run(begin()) == piece_bytes
    assert limits.upload_piece_bytes() == CHUNK_BYTES, "their slots are free again"
