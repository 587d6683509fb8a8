"""Partial reads of stored updates: the right tensors, and no bytes of the others."""

import numpy as np
import pytest
import torch
from sqlalchemy import delete, select
from support.crashes import InterruptibleAggregator
from support.desk import MEAN_OFFSETS, Desk, aggregate_until_idle
from support.plans import small_plan, update_tensors

from server.service.stored_tensors import load_part, load_tensors
from server.store import blobs
from server.store.database import Database
from server.store.tables import BlobChunk, Update
from shared.tensors.names import PERSONAL, SHARED
from shared.tensors.wire import encode

LARGE = torch.arange(600_000, dtype=torch.float32)  # more than a chunk
UPDATE = {
    "shared.a": LARGE,
    "personal.offset": torch.ones(2, 3),
    "shared.steps": torch.tensor(7),
    "personal.empty": torch.zeros(0, 4),
    "shared.b": -LARGE,
    "shared.flag": torch.tensor([True, False]),
}


def chunks(db: Database, blob_id: str) -> list[int]:
    with db.read() as session:
        query = select(BlobChunk.start).where(BlobChunk.blob_id == blob_id).order_by(BlobChunk.start)
        return list(session.execute(query).scalars())


def lose(db: Database, blob_id: str, starts: list[int]) -> None:
    """Lose chunks, as a failing disk would."""
    with db.write() as session:
        session.execute(delete(BlobChunk).where(BlobChunk.blob_id == blob_id, BlobChunk.start.in_(starts)))


def test_a_part_has_the_tensors_of_its_prefix(clean_db: Database) -> None:
    blob_id = blobs.store(clean_db, encode(UPDATE, {"report": "{}"}))
    assert len(chunks(clean_db, blob_id)) == 3
    whole = load_tensors(clean_db, blob_id)
    parts = [load_part(clean_db, blob_id, prefix) for prefix in (SHARED, PERSONAL, "nothing.")]
    assert [set(part) for part in parts] == [
        {"shared.a", "shared.b", "shared.flag", "shared.steps"},
        {"personal.empty", "personal.offset"},
        set(),
    ]
    for part in parts:
        for name, value in part.items():
            assert (value.dtype, value.shape) == (whole[name].dtype, whole[name].shape)
            assert np.array_equal(value, whole[name])


def test_tensors_of_any_layout_are_aligned(clean_db: Database) -> None:
    """Other programs may write narrow tensors first; torch computes slowly or not at all with misaligned ones."""
    data = bytes([1]) + torch.tensor([1.5, -2.5]).numpy().tobytes() + bytes([2, 0])
    header = (
        b'{"personal.flag": {"dtype": "BOOL", "shape": [1], "data_offsets": [0, 1]},'
        b' "shared.w": {"dtype": "F32", "shape": [2], "data_offsets": [1, 9]},'
        b' "shared.n": {"dtype": "I16", "shape": [], "data_offsets": [9, 11]}}'
    )
    blob_id = blobs.store(clean_db, len(header).to_bytes(8, "little") + header + data)
    part = load_part(clean_db, blob_id, SHARED)
    assert {name: value.tolist() for name, value in part.items()} == {"shared.w": [1.5, -2.5], "shared.n": 2}
    assert all(value.ctypes.data % 64 == 0 for value in part.values())


def test_a_blob_that_ends_early_is_an_error(clean_db: Database) -> None:
    blob_id = blobs.store(clean_db, encode(UPDATE)[:-1])
    with pytest.raises(ValueError, match="ends before its last tensor"):
        load_tensors(clean_db, blob_id)


def test_chunks_of_other_tensors_are_not_read(clean_db: Database) -> None:
    blob_id = blobs.store(clean_db, encode(UPDATE))
    lose(clean_db, blob_id, chunks(clean_db, blob_id)[1:])
    assert np.array_equal(load_part(clean_db, blob_id, PERSONAL)["personal.offset"], np.ones((2, 3)))


def test_a_round_ends_without_reading_the_folded_models_again(clean_db: Database) -> None:
    """Only the offset of each update remains to be read, so a round of large models ends soon after the last upload."""
    plan = small_plan(
        method=MEAN_OFFSETS, model={"dense_dim": 10_000}, image={"height": 32, "width": 32}, rounds={"min_clients": 2}
    )
    desk = Desk(clean_db, plan)
    sites = [desk.join("north"), desk.join("south")]
    for seed, who in enumerate(sites):
        desk.upload(who, seed)
    expected = torch.stack([offset_of(desk, seed) for seed in range(2)]).double().mean(dim=0).float()
    folded = 0

    def lose_what_was_folded(stage: str) -> None:
        nonlocal folded
        folded += stage == "after-fold"
        if stage == "after-fold" and folded == len(sites):
            with clean_db.read() as session:
                stored = [str(blob_id) for blob_id in session.execute(select(Update.blob_id)).scalars()]
            for blob_id in stored:
                lose(clean_db, blob_id, chunks(clean_db, blob_id)[1:])

    aggregate_until_idle(InterruptibleAggregator(desk.ctx, lose_what_was_folded))
    assert (desk.view.rounds_done, desk.view.state) == (1, "running")
    private = load_tensors(clean_db, str(desk.models()[-1].private_blob_id))
    assert np.array_equal(private["offset.mean"], expected)


def offset_of(desk: Desk, seed: int) -> torch.Tensor:
    return update_tensors(desk.plan, desk.round.facts, seed)["personal.offset"]
