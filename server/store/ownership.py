"""Whose an object store's prefix is. Two coordinators on one prefix would collect each other's models as garbage."""

import uuid
from contextlib import suppress

from sqlalchemy.exc import IntegrityError

from server.store.objects import OWNER_KEY, ObjectStoreError
from server.store.session import Database
from server.store.tables import Coordinator


def claim(db: Database) -> None:
    """Mark the prefix as this coordinator's, or refuse one that belongs to another. Replicas share one identity."""
    if db.objects is None:
        return
    owner = db.objects.claim(identity := _identity(db))
    if owner != identity:
        raise ObjectStoreError(
            f"{db.objects.address} belongs to the coordinator {owner[:32]!r}, this is {identity!r}.",
            next_step="Give this coordinator a prefix of its own with DISTRANS_BLOBS. "
            f"Only if nobody else uses this one: delete the object {OWNER_KEY} in it.",
        )


def claim_once(db: Database) -> None:
    """`claim`, the first time that this process writes an object."""
    if db.objects is not None and not db.objects.is_claimed:
        claim(db)
        db.objects.is_claimed = True


def _identity(db: Database) -> str:
    with db.read() as session:
        found = session.get(Coordinator, 1)
    if found is not None:
        return found.id
    with suppress(IntegrityError), db.write() as session:  # another replica may be first
        session.add(Coordinator(place=1, id=uuid.uuid4().hex))
    return _identity(db)
