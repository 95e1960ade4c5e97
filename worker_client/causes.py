"""What is said of a fault: its first cause, in words that hold no secret. Pure."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Mapping
from typing import Any

SHOWN = 2048  # of a text; what is longer is cut before anything is searched in it


def first_cause(fault: BaseException) -> BaseException:
    """The exception that the others were raised `from`.

    One that was only being handled meanwhile is no cause: a failed import of something optional
    may lie under an error that has nothing to do with it. cause_text() mentions it.
    """
    seen = {id(fault)}
    while fault.__cause__ is not None and id(fault.__cause__) not in seen:
        fault = fault.__cause__
        seen.add(id(fault))
    return fault


def cause_text(fault: BaseException) -> str:
    """ "TypeName: message", and what was being handled meanwhile, whatever __str__ does."""
    said = _said(fault)
    meanwhile = _innermost(fault)
    if meanwhile is not fault:
        said = f"{said[: SHOWN * 3 // 4]} (while handling {_said(meanwhile)[: SHOWN // 4]})"
    return said


def _innermost(fault: BaseException) -> BaseException:
    """The first of all that were raised or handled on the way to this one."""
    seen = {id(fault)}
    while True:
        below = fault.__cause__ or (None if fault.__suppress_context__ else fault.__context__)
        if below is None or id(below) in seen:
            return fault
        seen.add(id(below))
        fault = below


def _said(fault: BaseException) -> str:
    try:
        said = str(fault)[:SHOWN]
    except Exception:  # a __str__ of theirs may raise anything
        said = "its message cannot be shown"
    return f"{type(fault).__name__}: {said}" if said else type(fault).__name__


# What follows these words is hidden, unless it is a plain number: max_num_batched_tokens=8192.
_NAMED = re.compile(
    r"(?i)((?:token|secret|passw(?:or)?d|passphrase|authorization|credential|cookie|(?<=[?&])sig"
    r"|(?:api|private|secret|access|account)[_-]?key)s?"
    r"[\"']?\s*[=:]\s*(?:(?:bearer|basic)\s+)?[\"']?)(?!\d+(?:[\s\"',;&)\]}]|$))[^\s\"',;&]+"
)
_BEARER = re.compile(r"(?i)\b(bearer|basic)\s+[A-Za-z0-9._~+/-]{8,}=*")
_IN_URL = re.compile(r"(://)[^\s/@\"']+@")
# Tokens that say by their form what they are: Hugging Face, OpenAI, GitHub, AWS, Slack, JWT.
_BY_FORM = re.compile(
    r"\b(?:hf_[A-Za-z0-9]{16,}|sk-[A-Za-z0-9_-]{16,}|gh[pousr]_[A-Za-z0-9]{20,}"
    r"|github_pat_[A-Za-z0-9_]{20,}|AKIA[A-Z0-9]{16}|xox[abprs]-[A-Za-z0-9-]{10,}"
    r"|eyJ[A-Za-z0-9_-]{10,}\.[A-Za-z0-9_-]{10,}\.[A-Za-z0-9_-]*)"
)
_PEM = re.compile(r"-----BEGIN [A-Z ]*PRIVATE KEY-----.*?(?:-----END [A-Z ]*-----|$)", re.DOTALL)
_SECRET_KEY = re.compile(
    r"(?i)(?:^|[ ._/-])(?:token|secret|passw(?:or)?d|passphrase|credentials?|authorization"
    r"|(?:api|private|secret|access|account)[_-]?key)$"
)


def masked(text: str) -> str:
    """A text without what looks like a secret: a cause is shown to every rank, and kept."""
    text = _PEM.sub("***", text)
    text = _NAMED.sub(r"\1***", text)
    text = _BEARER.sub(r"\1 ***", text)
    text = _IN_URL.sub(r"\1***@", text)
    return _BY_FORM.sub("***", text)


def masked_inputs(inputs: Mapping[str, Any]) -> dict[str, Any]:
    """Inputs with secrets replaced by a short digest: they still differ where the values did."""
    return {key: _masked_value(key, value) for key, value in inputs.items()}


def _masked_value(key: str, value: Any) -> Any:
    if not isinstance(value, str) or not value:
        return value
    if isinstance(key, str) and _SECRET_KEY.search(key):
        hidden = "***"
    elif (hidden := masked(value)) == value:
        return value
    # 24 bits: two ranks with different values are told apart, nobody finds the value by it.
    return f"{hidden[:900]} (sha256 {hashlib.sha256(value.encode()).hexdigest()[:6]})"
