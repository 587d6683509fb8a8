"""The base model of everything that is validated strictly and never changes."""

from pydantic import BaseModel, ConfigDict


class Frozen(BaseModel):
    """Base class of plan tables, request bodies and measurements: immutable, no unknown keys, finite numbers only."""

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)
