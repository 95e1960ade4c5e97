"""How a message says that it cannot be true: the field, the value, and what to do."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, NamedTuple, Self

from pydantic import (
    BaseModel,
    ConfigDict,
    ModelWrapValidatorHandler,
    ValidationError,
    ValidatorFunctionWrapHandler,
    model_validator,
)
from pydantic_core import PydanticCustomError

from kvaccord.errors import Invalid

if TYPE_CHECKING:
    from pydantic._internal._model_construction import ModelMetaclass
else:
    ModelMetaclass = type(BaseModel)

SHOWN = 80  # characters of a value, which may be as long as a body
# Above it faults are counted, not listed: every one of a body of 1 MiB that is wrong throughout
# would be a document of its own, 1.5 GB in all. A field misspelt on every rank stays below.
MANY_FAULTS = 4096

WHAT_TO_DO = {
    "missing": "it is required: add it",
    "extra_forbidden": "no such field in this protocol: remove it or correct its name",
    "int_type": "expected a whole number, without quotes or decimals",
    "string_type": "expected a string",
}


def impossible(field: str, value: object, sentence: str) -> PydanticCustomError:
    """An error for a validator to raise; it becomes a sentence on either side of the wire."""
    # The sentence travels as context: a template would trip over braces in it.
    return PydanticCustomError(
        "impossible", "{sentence}", {"sentence": sentence, "field": field, "value": str(value)}
    )


def few_faults(value: object, validate: ValidatorFunctionWrapHandler) -> Any:
    """A wrapping validator: of a value with more than MANY_FAULTS faults it says one, how many."""
    try:
        return validate(value)
    except ValidationError as error:
        if (count := error.error_count()) <= MANY_FAULTS:
            raise
        raise impossible(
            "",
            f"({count} faults)",
            "it is wrong throughout; docs/protocol.md has its form: send a part of it to hear what"
            " is wrong there",
        ) from None


class Fault(NamedTuple):
    """One error of a validation. sentence: names the field and the value, and says what to do."""

    field: str
    value: str
    sentence: str


def fault_of(error: Mapping[str, Any], path: list[Any], *, whole: str) -> Fault:
    """One of `ValidationError.errors()`, found at this path; `whole` names what has no path."""
    field = ".".join(map(str, path)) or whole
    if error["type"] == "impossible":
        context = error["ctx"]
        value, named = str(context["value"]), str(context["field"])
        if not named:
            return Fault(field, value, f"{field} {value}: {context['sentence']}")
        field = named if not path else f"{field}.{named}"
        return Fault(field, value, str(context["sentence"]))
    value = _shown(error)
    remedy = WHAT_TO_DO.get(
        error["type"], f"{error['msg'][:1].lower()}{error['msg'][1:]}; correct it"
    )
    return Fault(field, value, f"{field} {value}: {remedy}")


def _shown(error: Mapping[str, Any]) -> str:
    if error["type"] == "missing":
        return "absent"
    given = error.get("input")
    if isinstance(given, dict | list):
        return f"(a JSON {'object' if isinstance(given, dict) else 'array'})"
    return str(given).encode(errors="replace")[:SHOWN].decode(errors="ignore")


class _Sayable(ModelMetaclass):
    """Whoever builds a message in a program hears one sentence of ours, not pydantic's page.

    Only a call of the class comes here; what is read from the wire is validated without it.
    """

    if not TYPE_CHECKING:  # who checks types reads the fields instead

        def __call__(cls, *args: Any, **fields: Any) -> Any:
            try:
                return super().__call__(*args, **fields)
            except ValidationError as error:
                faults = error.errors(include_url=False)
                fault = fault_of(faults[0], list(faults[0]["loc"]), whole=cls.__name__)
                more = f" ({len(faults) - 1} more faults in it)" if faults[1:] else ""
                raise Invalid(
                    f"{cls.__name__}: {fault.sentence}{more}", field=fault.field, value=fault.value
                ) from None


class Message(BaseModel, metaclass=_Sayable):
    """Unknown fields are refused: a misspelt limit must not be silently ignored.

    Raises Invalid when it is built from values that cannot be true.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    @model_validator(mode="wrap")
    @classmethod
    def _few_faults(cls, value: object, validate: ModelWrapValidatorHandler[Self]) -> Self:
        return few_faults(value, validate)  # type: ignore[no-any-return]
