"""A judgement for people: text, and Markdown for a comment. Pure: lines come out."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from kvaccord.layout import as_ranges, named
from reader.advice import advice_of
from reader.judge import Judgement
from reader.numbers import GIB, ROUNDING_GIB, Row
from reader.sights import Place

PASSED, FAILED, INCONCLUSIVE = 0, 2, 3
TEXT_MAX = 400  # characters of what an engine said
ROWS_MAX = 64  # a table of a thousand alike ranks helps nobody
LINES_MAX = 4  # of consequences, and of further causes


def exit_code_of(judged: Judgement) -> int:
    """0 agreed and usable, 2 failed or unusable or not agreed, 3 inconclusive."""
    words = (judged.agreed.word, judged.usable.word)
    if "no" in words:
        return FAILED
    return PASSED if words == ("yes", "yes") else INCONCLUSIVE


def clean(text: str) -> str:
    """Text of a log for a terminal, on one line: no control character gets through."""
    short = text if len(text) <= TEXT_MAX else text[: TEXT_MAX - 1] + "…"
    return "".join(c if c.isprintable() else " " for c in short).strip()


def headline(judged: Judgement) -> str:
    """The cause in one line."""
    stall, numbers = judged.stall, judged.numbers
    if judged.status == "agreed":
        verb = "binds" if len(numbers.binding) == 1 else "bind"
        some = any(row.binds for row in numbers.rows)
        bound = f"; {named(numbers.binding)} {verb}" if some else ""
        return f"agreed and usable: {numbers.value} {numbers.unit}, {judged.agreed.why}{bound}"
    if judged.status == "disagreed":
        return f"the ranks did not agree: {clean(judged.agreed.why)}"
    if stall and stall.times:
        span = f" over {stall.span_s:.0f} s" if stall.span_s is not None else ""
        before = "" if numbers.value is not None else " before any count"
        return f"hangs{before}: “{clean(stall.at)}” {stall.times} times{span}"
    if stall:
        spread = f" (spread {numbers.spread})" if numbers.spread else ""
        agreed = f"{numbers.value} {numbers.unit} agreed{spread}"
        if numbers.value is None:
            agreed = "no count before it"
        end = "the log ends there"
        if stall.span_s is not None:
            end = f"nothing more of the start in {stall.span_s:.0f} s"
        return f"hangs at “{stall.at}”: {end}; {agreed}"
    if judged.status.startswith("failed"):
        return _failed(judged)
    answer = judged.agreed if judged.agreed.word != "yes" else judged.usable
    return f"inconclusive: {clean(answer.why)}"


def _failed(judged: Judgement) -> str:
    blame = judged.blame
    if blame.first is None and blame.consequences:
        who = f" {named(blame.victims)} only suffered;" if blame.victims else ""
        look = f" look at {named(blame.suspects)}" if blame.suspects else " nothing here names it"
        return f"failed, and the first cause is not in this log:{who}{look}"
    if blame.first is None:
        who = f"{named(judged.numbers.binding)}: " if judged.numbers.binding else ""
        return f"{who}{clean(judged.usable.why)}"
    came = ": " if blame.first.trouble.kind != "late" else " did not come: "
    short = judged.numbers.least_gib is not None and judged.numbers.least_gib <= 0
    ranks = blame.ranks or (judged.numbers.binding if short else ())
    who = f"{named(ranks)}{came}" if ranks else ""
    times = f" [{blame.first.times} times]" if blame.first.times > 1 else ""
    return f"{who}{clean(blame.text)}{times}"


# --- text ---------------------------------------------------------------------------------------


def text_of(judged: Judgement) -> Iterator[str]:
    yield headline(judged)
    advice = advice_of(judged)
    if advice.command:
        yield f"next       {clean(advice.command)}"
        yield f"           {advice.why}"
    version = f" {judged.start.version}" if judged.start.version else ""
    yield f"engine     {judged.engine}{version}, {_world(judged)}"
    for what, answer in (("agreed", judged.agreed), ("usable", judged.usable)):
        yield f"{what:10} {answer.word}: {clean(answer.why)}"
        if answer.missing:
            yield f"           missing: {_some(answer.missing)}"
    yield from _numbers(judged)
    yield from _blame(judged)
    if judged.step and judged.status != "agreed":
        yield f"last step  {judged.step}"
    if judged.behind and judged.status != "agreed":
        yield f"           {named(judged.behind)} not so far"
    if judged.restarts:
        yield f"before     {_restarts(judged)}"
    for note in judged.notes:
        yield f"note       {note}"
    if table := _table(judged):
        yield ""
        yield from table


def _world(judged: Judgement) -> str:
    seen, world = len(judged.numbers.rows), judged.seats.world
    if world is None:
        return "ranks unknown"
    if not seen and not judged.seats.sure:
        return f"at least {world} ranks"
    if seen in (0, world):
        return "one rank" if world == 1 else f"{world} ranks"
    return f"{seen} of {world} ranks seen"


def _some(items: Sequence[str], shown: int = 8) -> str:
    rest = f" and {len(items) - shown} more" if len(items) > shown else ""
    return f"{', '.join(items[:shown])}{rest}"


def _numbers(judged: Judgement) -> Iterator[str]:
    numbers = judged.numbers
    if numbers.value is None:
        return
    spread = f", spread {numbers.spread}" if numbers.spread else ""
    yield f"goes on    with {numbers.value} {numbers.unit}{spread}"
    if numbers.why_binding:
        yield f"binding    {named(numbers.binding)}: {numbers.why_binding} (within rounding)"
    if lost := [row for row in numbers.rows if row.stranded_count]:
        count = sum(row.stranded_count or 0 for row in lost)
        size = sum(row.stranded_bytes or 0 for row in lost)
        about = f", about {_size(size)}" if size else ""
        yield f"stranded   {count} {numbers.unit}{about} on {named([row.rank for row in lost])}"
    elif (free := sum(row.stranded_gib or 0.0 for row in numbers.rows)) > ROUNDING_GIB:
        yield f"stranded   {free:.2f} GiB in all (within rounding), above the tightest rank"


def _size(n_bytes: int) -> str:
    return f"{n_bytes / GIB:.2f} GiB" if n_bytes >= GIB // 10 else f"{n_bytes / 2**20:.1f} MiB"


def _blame(judged: Judgement) -> Iterator[str]:
    blame = judged.blame
    if judged.start.ready:
        return
    if blame.first:
        yield f"cause      {judged.code}, {_at(blame.first.place)}"
    if blame.first and blame.missing:
        of = dict(blame.first.trouble.facts).get("of", "ranks")
        who = named(blame.missing) if of == "ranks" else f"{of} {as_ranges(blame.missing)}"
        yield f"           did not come: {who}"
    for seen in blame.others[:LINES_MAX]:
        yield f"also       {seen.trouble.code}: {clean(seen.trouble.text)}"
    for seen in blame.consequences[:LINES_MAX]:
        who = judged.seats.label(seen.key)
        yield f"victim     {who}, {_at(seen.place)}: {clean(seen.trouble.text)}"
    if (more := len(blame.consequences) - LINES_MAX) > 0:
        yield f"           and {more} more"


def _at(place: Place) -> str:
    return f"{clean(place.file)}:{place.line}"


def _restarts(judged: Judgement) -> str:
    starts = "one start" if judged.restarts == 1 else f"{judged.restarts} starts"
    if judged.alike == judged.restarts:
        return f"{starts} in this log, which ended alike"
    return f"{starts} in this log; {judged.alike} ended as this one did"


_COLUMNS = (
    ("free_gib", "free GiB"),
    ("available_gib", "available GiB"),
    ("weights_gib", "weights GiB"),
    ("peak_torch_gib", "peak GiB"),
    ("non_torch_gib", "non-torch GiB"),
    ("kv_gib", "KV GiB"),
)


def _cells(judged: Judgement) -> list[list[str]]:
    rows = judged.numbers.rows
    used = [(n, title) for n, title in _COLUMNS if any(n in row.facts for row in rows)]
    unit = next((row.unit for row in rows if row.unit), None)
    if not unit and not used:
        return []
    steps = ["stands at"] if any(row.step for row in rows) else []
    bound = [""] if any(row.binds for row in rows) else []
    head = ["rank", *([unit] if unit else []), *(title for _, title in used), *steps, *bound]
    cells = [head]
    for row in rows[:ROWS_MAX]:
        counts = [str(row.count) if row.count is not None else "-"] if unit else []
        facts = [f"{row.facts[n]:.2f}" if n in row.facts else "-" for n, _ in used]
        stands = [row.step or "-"] if steps else []
        binds = ["binds" if row.binds else ""] if bound else []
        cells.append([_name(row), *counts, *facts, *stands, *binds])
    return cells


def _name(row: Row) -> str:
    return clean(str(row.rank) if row.label == f"rank {row.rank}" else f"{row.rank} ({row.label})")


def _table(judged: Judgement) -> list[str]:
    cells = _cells(judged)
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    lines = [
        "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()
        for row in cells
    ]
    if cells and len(judged.numbers.rows) > ROWS_MAX:
        lines.append(f"and {len(judged.numbers.rows) - ROWS_MAX} more; --json has them all")
    return lines


# --- markdown -----------------------------------------------------------------------------------


def markdown_of(judged: Judgement) -> Iterator[str]:
    """For a comment or a job's summary."""
    yield f"**{_escaped(headline(judged))}**"
    yield ""
    advice = advice_of(judged)
    if advice.command:
        command = clean(advice.command).replace("`", "'")
        yield f"Next: `{command}` ({_escaped(advice.why)})"
        yield ""
    yield "| question | answer | why |"
    yield "|---|---|---|"
    for what, answer in (("did they agree", judged.agreed), ("is it usable", judged.usable)):
        missing = f"; missing: {_some(answer.missing)}" if answer.missing else ""
        yield f"| {what} | {answer.word} | {_escaped(answer.why + missing)} |"
    if cells := _cells(judged):
        yield ""
        head, *body = ([_escaped(cell) or " " for cell in row] for row in cells)
        yield f"| {' | '.join(head)} |"
        yield f"|{'---|' * len(head)}"
        for row in body:
            yield f"| {' | '.join(row)} |"
    if judged.notes:
        yield ""
    for note in judged.notes:
        yield f"- {_escaped(note)}"


def _escaped(text: str) -> str:
    plain = clean(text).replace("\\", "\\\\").replace("|", "\\|")
    return plain.replace("<", "&lt;").replace("*", "\\*").replace("`", "\\`").replace("_", "\\_")
