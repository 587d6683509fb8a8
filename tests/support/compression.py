"""The ways to compress updates."""

from shared.contract.plan import UpdateCompression

OPTIONS: tuple[UpdateCompression, ...] = ("bf16", "int8", "int4")
