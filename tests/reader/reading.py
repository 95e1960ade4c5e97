"""The logs that the tests read: of engines, versions and reported failures."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from reader.files import whole_lines
from reader.judge import Judgement, judge
from reader.scan import Scan

HERE = Path(__file__).parent
LOGS = sorted((HERE / "logs").glob("*.log"))
SHAPES = HERE / "shapes.txt"  # lines that none of the logs has, one each
CASES = sorted((HERE / "cases").glob("*.json"))


def scanned(*texts: str | bytes, names: tuple[str, ...] = (), chunk: int = 2**18) -> Scan:
    """Each text as a file of its own."""
    scan = Scan()
    for n, text in enumerate(texts):
        raw = text.encode() if isinstance(text, str) else text
        scan.begin(names[n] if names else f"{n}.log")
        for piece in whole_lines(raw[at : at + chunk] for at in range(0, len(raw), chunk)):
            scan.feed(piece)
    return scan


def read(*texts: str | bytes, ranks: int | None = None, **layout: int) -> Judgement:
    scan = scanned(*texts)
    return judge(scan.last(), scan.earlier(), scan.restarts(), ranks, layout or None)


def a_case(number: str) -> dict[str, Any]:
    (path,) = (HERE / "cases").glob(f"{number}-*.json")
    case: dict[str, Any] = json.loads(path.read_text())
    return case


def log_of(case: dict[str, Any]) -> str:
    return "\n".join(case["input"]["log"]) + "\n"
