"""A cache for large tensors that many request threads want at once, such as a method's private server state."""

import threading
from collections import OrderedDict
from collections.abc import Callable, Hashable
from concurrent.futures import Future

from server.service.stored_tensors import load_tensors
from server.store.database import Database
from server.store.tables import Blob
from shared.tensors.names import Tensors


class TensorCache:
    """Tensors by key. Concurrent callers share one load; failed loads are not cached.

    Values kept or being loaded total at most `max_bytes`; a larger one is kept alone.
    """

    def __init__(self, max_bytes: int) -> None:
        self._max_bytes = max_bytes
        self._loads: OrderedDict[Hashable, tuple[int, Future[Tensors]]] = OrderedDict()  # least recently used first
        self._changed = threading.Condition()

    def get(self, key: Hashable, size_bytes: int, load: Callable[[], Tensors]) -> Tensors:
        """Return the value of the key. The first caller loads it once there is room; the others wait."""
        with self._changed:
            self._changed.wait_for(lambda: key in self._loads or self._make_room(size_bytes))
            is_first = key not in self._loads
            _, found = self._loads.setdefault(key, (size_bytes, Future()))
            self._loads.move_to_end(key)
        if not is_first:
            return found.result()
        try:
            found.set_result(load())
        except BaseException as error:
            with self._changed:
                del self._loads[key]
            found.set_exception(error)
            raise
        finally:
            with self._changed:
                self._changed.notify_all()
        return found.result()

    def _make_room(self, size_bytes: int) -> bool:
        """Evict the least recently used values as needed; return whether a new one fits."""
        for key, (_, load) in list(self._loads.items()):
            if self._fits(size_bytes):
                break
            if load.done():
                del self._loads[key]
        return self._fits(size_bytes)

    def _fits(self, size_bytes: int) -> bool:
        return not self._loads or size_bytes + sum(size for size, _ in self._loads.values()) <= self._max_bytes


_private_states = TensorCache(max_bytes=1 << 30)  # pFedHN's are as large as its hypernetwork, possibly gigabytes


def load_private_state(db: Database, blob_id: str) -> Tensors:
    """Return the private server state in a blob, cached."""
    with db.read() as session:
        blob = session.get(Blob, blob_id)

    return _private_states.get((db, blob_id), blob.size_bytes if blob else 0, lambda: load_tensors(db, blob_id))
