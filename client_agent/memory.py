"""Python's garbage collection."""

import gc


def exempt_from_collection() -> None:
    """Exempt all objects that exist now from garbage collection: call it once everything is loaded.

    A full collection visits every object, of which torch and the web framework have hundreds of thousands. That takes
    0.1 to 0.3 s, for which all requests would have to wait every few thousand calls.
    """
    gc.collect()  # what is exempted now is never freed if it is part of a cycle
    gc.freeze()
