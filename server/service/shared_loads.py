"""Large tensors that many request threads want at once: loaded by one of them, kept within a number of bytes."""

import threading
from collections import OrderedDict
from collections.abc import Callable, Hashable
from concurrent.futures import Future

from shared.methods.base import Tensors


class SharedLoads:
    """Tensors by key. Concurrent callers share one load; a load that failed is not remembered.

    Values that are kept or being loaded have at most `max_bytes` together; one that is larger than that is alone.
    """

    def __init__(self, max_bytes: int) -> None:
        self._max_bytes = max_bytes
        self._loads: OrderedDict[Hashable, tuple[int, Future[Tensors]]] = OrderedDict()  # the last one used stands last
        self._changed = threading.Condition()

    def get(self, key: Hashable, size_bytes: int, load: Callable[[], Tensors]) -> Tensors:
        """Return the value of the key. The first caller loads it, once there is room; the others wait for that."""
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
        """Forget values, those first that were not used for the longest time; whether there is room for a new one."""
        for key, (_, load) in list(self._loads.items()):
            if self._fits(size_bytes):
                break
            if load.done():
                del self._loads[key]
        return self._fits(size_bytes)

    def _fits(self, size_bytes: int) -> bool:
        return not self._loads or size_bytes + sum(size for size, _ in self._loads.values()) <= self._max_bytes
