"""Start files: what every rank of a start reports, what befalls it, and what must come of it.

`examples/starts/README.md` documents the fields. The library is that folder; an installation
from a wheel has the packaged default alone.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field, ValidationError, model_validator

from cli.rank import report_of
from kvaccord.faulty import Message
from kvaccord.layout import Layout, named
from kvaccord.messages import RankKey, Report

RECORDED = Path(__file__).parent / "recorded" / "deepseek_v4_pro_tp4_pcp2.json"
LIBRARY = Path(__file__).parents[1] / "examples" / "starts"

Kind = Literal["raise", "kill", "absent", "late", "stuck", "restart", "duplicate", "impossible"]
Seconds = Annotated[float, Field(gt=0, le=10**7)]


class Fate(Message):
    """What befalls one rank. A bare word is a fate before the report."""

    kind: Kind
    at: Literal["report", "apply"] = "report"  # raise, kill and stuck: before which step
    after_s: float = Field(default=0.0, ge=0)  # late: so long after the others


def _fate(said: object) -> object:
    return {"kind": said} if isinstance(said, str) else said


class Budgets(Message):
    """Settings of the private coordinator that plays this start; absent ones are the usual."""

    gather_s: Seconds | None = None
    report_s: Seconds | None = None
    apply_s: Seconds | None = None
    lost_after_s: Seconds | None = None
    stall_s: Seconds | None = None  # without progress for so long is stuck

    def options(self) -> list[str]:
        return [
            f"--{name.replace('_', '-')}={value}"
            for name, value in self.model_dump(exclude_none=True).items()
        ]


class Expected(Message):
    """What must come of it. What is absent is not checked."""

    verdict: Literal["SEALED", "FAILED", "ABORTED", "NO VERDICT"]
    code: str | None = None
    ranks: tuple[int, ...] | None = None  # those that the verdict blames
    entries: dict[str, int] | None = None  # of every rank, of the classes it has


class Start(Message):
    """A start file. A report's field beside these holds for every rank without its own."""

    about: str = "no word about its origin"
    engine: str
    layout: Layout = Layout()
    ranks: Annotated[tuple[dict[str, Any], ...], Field(min_length=1)]
    fates: dict[RankKey, Annotated[Fate, BeforeValidator(_fate)]] = Field(default_factory=dict)
    report_after_s: float = Field(default=0.0, ge=0)
    budgets: Budgets = Budgets()
    expect: Expected | None = None
    shared: dict[str, Any] = Field(default_factory=dict)

    @model_validator(mode="before")
    @classmethod
    def _gather_shared(cls, document: Any) -> Any:
        if not isinstance(document, dict):
            return document
        shared = {key: document[key] for key in Report.model_fields if key in document}
        return {k: v for k, v in document.items() if k not in shared} | {"shared": shared}

    @model_validator(mode="after")
    def _ranks_are_the_layout(self) -> Start:
        world = self.layout.world_size
        if len(self.ranks) != world:
            raise ValueError(f"{len(self.ranks)} ranks; the layout has {named(range(world))}")
        if outside := sorted(rank for rank in self.fates if rank >= world):
            raise ValueError(f"fates of {named(outside)}; the layout has {named(range(world))}")
        return self

    def reports(self) -> list[dict[str, Any]]:
        """One document a rank, as it is reported."""
        return [self.shared | row for row in self.ranks]


def read_start(path: Path) -> Start:
    """A start file, checked whole: a fault in it is ours to name, not eight ranks'.

    Raises ValueError with a sentence. A rank whose fate is `impossible` may report what it likes.
    """
    try:
        document = json.loads(path.read_text())
        start = Start.model_validate(document)
        for rank in range(start.layout.world_size):
            if rank not in start.fates or start.fates[rank].kind != "impossible":
                report_of(document, rank)
    except (OSError, ValueError, LookupError, TypeError) as fault:
        raise ValueError(f"{path}: {type(fault).__name__}: {_said(fault)}") from None
    return start


def _said(fault: Exception) -> str:
    if not isinstance(fault, ValidationError):
        return str(fault)
    first = fault.errors()[0]
    where = ".".join(map(str, first["loc"]))
    return f"{where}: {first['msg']}" if where else str(first["msg"])


FOLDER = LIBRARY if LIBRARY.is_dir() else RECORDED.parent  # what there is to play


def library(folder: Path = FOLDER) -> list[Path]:
    """The start files at hand, by name."""
    return sorted(folder.glob("*.json"), key=lambda path: path.stem)


def find_start(word: str) -> Path:
    """A start by its name in the library, or by its path. Raises ValueError with a sentence."""
    for path in library():
        if word in (path.stem, path.name):
            return path
    if Path(word).is_file():
        return Path(word)
    names = ", ".join(path.stem for path in library())
    raise ValueError(f"no start {word!r}; name a file, or one of: {names}")
