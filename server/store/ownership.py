"""Ownership of a prefix or folder: two coordinators sharing one would delete each other's models as garbage."""

import uuid
from contextlib import suppress

from sqlalchemy.exc import IntegrityError

from server.store.database import Database
from server.store.objects.store import OWNER_KEY, ObjectStoreError
from server.store.tables import Coordinator


def claim(db: Database) -> None:
    """Claim the object store for this coordinator; raise if another owns it. Replicas share one identity."""
    if db.objects is None:
        return
    owner = db.objects.claim(identity := _identity(db))
    if owner != identity:
        raise ObjectStoreError(
            f"{db.objects.address} belongs to coordinator {owner[:32]!r}; this is {identity!r}.",
            next_step="Set DISTRANS_BLOBS to a prefix or folder that no other coordinator uses. "
            f"If the other coordinator no longer exists, delete {OWNER_KEY} in it instead.",
        )


def claim_once(db: Database) -> None:
    """Call `claim` the first time this process writes an object."""
    if db.objects is not None and not db.objects.is_claimed:
        claim(db)
        db.objects.is_claimed = True


def _identity(db: Database) -> str:
    with db.read() as session:
        found = session.get(Coordinator, 1)
    if found is not None:
        return found.id
    with suppress(IntegrityError), db.write() as session:  # another replica may get there first
        session.add(Coordinator(place=1, id=uuid.uuid4().hex))
    return _identity(db)
