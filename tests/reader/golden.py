"""Writes what `kvaccord read` says of every log in `logs/`: `python -m tests.reader.golden`.

The golden files are read by eye before they are committed; `test_golden.py` compares.
"""

from __future__ import annotations

import json
from pathlib import Path

from reader.document import document_of
from reader.judge import judge
from reader.show import text_of
from tests.reader.reading import HERE, LOGS, scanned

GOLDEN = HERE / "golden"


def spoken(path: Path) -> tuple[str, str]:
    """Text and JSON of a log."""
    scan = scanned(path.read_bytes(), names=(path.name,))
    judged = judge(scan.last(), scan.earlier(), scan.restarts())
    document = json.dumps(document_of(judged), indent=1, ensure_ascii=False)
    return "\n".join(text_of(judged)) + "\n", document + "\n"


if __name__ == "__main__":
    for log in LOGS:
        text, document = spoken(log)
        (GOLDEN / f"{log.stem}.txt").write_text(text)
        (GOLDEN / f"{log.stem}.json").write_text(document)
