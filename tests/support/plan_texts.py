"""Plans as users write them, and the errors they get back."""

from typing import Any

import pytest

from shared.contract.errors import PlanError
from shared.contract.plan import parse_plan, validate_plan

MINIMAL = """
name = "birds"
classes = ["owl", "finch"]
"""
PAPER = 'preset = "paper"\n' + MINIMAL


def plan_data(**tables: Any) -> dict[str, Any]:
    """Return a minimal plan as plain data, with these tables."""
    return {"name": "birds", "classes": ["owl", "finch"], **tables}


def plan_errors(text_or_data: str | dict[str, Any]) -> dict[str, str]:
    """Return the errors of an invalid plan by field."""
    with pytest.raises(PlanError) as caught:
        parse_plan(text_or_data) if isinstance(text_or_data, str) else validate_plan(text_or_data)
    head, *lines = str(caught.value).splitlines()
    assert head == ("The plan has an error:" if len(lines) == 1 else f"The plan has {len(lines)} errors:")
    errors = dict(line.strip().split(": ", 1) for line in lines)
    assert len(errors) == len(lines)
    return errors
