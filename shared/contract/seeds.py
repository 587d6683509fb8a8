"""Seeds: every random choice in a federation follows from the plan's seed and the name of its purpose."""

import hashlib


def derive_seed(*parts: str | int) -> int:
    """Return a 63-bit seed that depends on all parts and their order, and is the same on every machine."""
    text = "\x1f".join(f"{type(part).__name__}:{part}" for part in parts)
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "big") >> 1
