"""How a message says that it cannot be true: the field, the value, and what to do."""

from __future__ import annotations

from pydantic_core import PydanticCustomError


def impossible(field: str, value: object, sentence: str) -> PydanticCustomError:
    """An error for a validator to raise; the coordinator turns it into a problem document."""
    # The sentence travels as context: a template would trip over braces in it.
    return PydanticCustomError(
        "impossible", "{sentence}", {"sentence": sentence, "field": field, "value": str(value)}
    )
