"""The documents that cross the wire from a worker. Sizes are bytes, durations seconds."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from typing import Annotated, Literal

from pydantic import (
    AfterValidator,
    BeforeValidator,
    Field,
    Strict,
    StringConstraints,
    model_validator,
)

from kvaccord.canonical import INT_LIMIT
from kvaccord.faulty import Message, impossible
from kvaccord.layout import MAX_WORLD, Groups, Layout

PROTOCOL = 1

Whole = Annotated[int, Strict(), Field(ge=0, lt=INT_LIMIT)]
Positive = Annotated[int, Strict(), Field(ge=1, lt=INT_LIMIT)]
Bytes = Whole
SignedBytes = Annotated[int, Strict(), Field(gt=-INT_LIMIT, lt=INT_LIMIT)]
Rank = Annotated[int, Strict(), Field(ge=0, lt=MAX_WORLD)]

Text = Annotated[str, StringConstraints(max_length=1024)]
Name = Annotated[str, StringConstraints(pattern=r"^[A-Za-z0-9._:-]{1,64}$")]
EngineWord = Annotated[str, StringConstraints(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]{0,127}$")]
Printable = Annotated[str, StringConstraints(pattern=r"^[\x21-\x7e]{1,200}$")]
Key = Annotated[str, StringConstraints(pattern=r"^[\x20-\x7e]{1,128}$")]
# A float has no canonical spelling, so none may stand in what is digested.
MAX_MAP_BYTES = 16384


def _scalar(value: object) -> object:
    if isinstance(value, bool) or (isinstance(value, int) and abs(value) < INT_LIMIT):
        return value
    if isinstance(value, str) and len(value) <= 1024:
        return value
    raise impossible(
        "",
        value if isinstance(value, float | None) else f"{type(value).__name__}",
        "expected a string of at most 1024 characters, true or false, or a whole number below 2^53;"
        " send anything else as a string",
    )


def _bounded(values: dict[str, int | bool | str]) -> dict[str, int | bool | str]:
    size = sum(len(key) + len(str(value)) for key, value in values.items())
    if size > MAX_MAP_BYTES:
        raise impossible(
            "",
            f"{size} characters",
            f"{size} characters of keys and values, {MAX_MAP_BYTES} may be; send a digest instead"
            " of long values",
        )
    return values


Scalar = Annotated[int | bool | str, BeforeValidator(_scalar)]
OpenMap = Annotated[dict[Key, Scalar], Field(max_length=256), AfterValidator(_bounded)]


def _rank_key(key: object) -> object:
    # JSON keys are strings; "03" and "3" must not be two names of one rank.
    if isinstance(key, str) and key.isascii() and key.isdigit() and str(int(key[:9])) == key:
        return int(key)
    return key


RankKey = Annotated[Rank, BeforeValidator(_rank_key)]


def cut(text: str, limit: int) -> str:
    """The first `limit` bytes of a text in UTF-8, never half a character."""
    return text.encode(errors="replace")[:limit].decode(errors="ignore")


def cut_front(text: str, limit: int) -> str:
    """The last `limit` bytes of a text in UTF-8: the end of a traceback says most."""
    return text.encode(errors="replace")[-limit:].decode(errors="ignore")


# A "no" must never be refused for its form: it is cut or filled in, on whichever side sees it.
def _cause_text(text: object) -> object:
    return cut(text, 2048).strip() or "no reason given" if isinstance(text, str) else text


def _trace(text: object) -> object:
    return cut_front(text, 6144) if isinstance(text, str) else text


CauseText = Annotated[str, BeforeValidator(_cause_text)]
Trace = Annotated[str, BeforeValidator(_trace)]


class CacheClass(Message):
    """One kind of cache entry on one rank.

    page: takes the memory that remains; an entry is one KV block (SGLang: page) of this rank's
    layers and heads, `entry_bytes` each. The count is a multiple of `multiple_of`.
    state: `max_num_seqs * entries_per_req + extra_entries` entries, reserved first.
    Source: ATOM `sub_pool_spec.py` (PAGE and STATE); vLLM `KVCacheSpec.page_size_bytes`.
    """

    kind: Literal["page", "state"]
    name: Name
    entry_bytes: Positive
    entries_per_req: Whole = 0
    extra_entries: Whole = 0
    multiple_of: Positive = 1
    min_entries: Whole | None = None
    max_entries: Positive | None = None

    @model_validator(mode="after")
    def _fields_belong_to_the_kind(self) -> CacheClass:
        if self.kind == "page":
            for field in ("entries_per_req", "extra_entries"):
                if value := getattr(self, field):
                    raise impossible(
                        field,
                        value,
                        f"page class {self.name!r} has {field} {value}; a page class takes what"
                        " remains: leave it out, or declare a state class",
                    )
            limit = self.max_entries
            if limit is not None and limit // self.multiple_of * self.multiple_of < max(
                self.min_entries or 0, 1
            ):
                raise impossible(
                    "max_entries",
                    limit,
                    f"page class {self.name!r} has max_entries {limit}, which leaves no count that"
                    f" is a multiple of {self.multiple_of} and at least min_entries"
                    f" {self.min_entries or 1}; raise max_entries or lower min_entries",
                )
        else:
            for field, default in (
                ("multiple_of", 1),
                ("min_entries", None),
                ("max_entries", None),
            ):
                if (value := getattr(self, field)) != default:
                    raise impossible(
                        field,
                        value,
                        f"state class {self.name!r} has {field} {value}; a state class is sized by"
                        " entries_per_req and extra_entries: leave it out",
                    )
        return self


def page(
    name: str,
    entry_bytes: int,
    *,
    multiple_of: int = 1,
    min_entries: int | None = None,
    max_entries: int | None = None,
) -> CacheClass:
    """A page class: as many entries of `entry_bytes` as the remaining memory holds."""
    return CacheClass(
        kind="page",
        name=name,
        entry_bytes=entry_bytes,
        multiple_of=multiple_of,
        min_entries=min_entries,
        max_entries=max_entries,
    )


def state(
    name: str, entry_bytes: int, *, entries_per_req: int = 0, extra_entries: int = 0
) -> CacheClass:
    """A state class: `max_num_seqs * entries_per_req + extra_entries` entries, reserved first."""
    return CacheClass(
        kind="state",
        name=name,
        entry_bytes=entry_bytes,
        entries_per_req=entries_per_req,
        extra_entries=extra_entries,
    )


class Report(Message):
    """What one rank measured on its own device, weights loaded and profiling pass over.

    A page entry on this rank is one KV block: `block_tokens` tokens of K and V, for the layers of
    its PP stage and its share of the KV heads.
    Source: torch.cuda.mem_get_info() -> (free, total), bytes.
    """

    free_bytes: Bytes
    kv_budget_bytes: SignedBytes  # what the engine may spend on KV cache by its own formula
    reserve_bytes: Bytes = 0  # will still be allocated outside the classes; in neither number yet
    total_bytes: Bytes | None = None
    initial_free_bytes: Bytes | None = None  # free when the process began
    requested_bytes: Bytes | None = None  # the share of total that the engine insists on
    max_num_seqs: Whole = 0
    max_model_len: Whole | None = None
    block_tokens: Positive | None = None
    inputs: OpenMap | None = None  # must be equal over the engine
    inputs_stage: OpenMap | None = None  # must be equal over a PP stage
    local_count: Positive | None = None  # processes of this engine that share the device
    # Other resources (host tier, disk); a rank without one that its peers have says 0.
    capacities: Annotated[dict[Name, Bytes], Field(max_length=32)] | None = None
    classes: Annotated[tuple[CacheClass, ...], Field(min_length=1, max_length=32, fail_fast=True)]
    parts: OpenMap | None = None  # explains the numbers; changes none

    @property
    def has_page(self) -> bool:
        return any(c.kind == "page" for c in self.classes)

    @model_validator(mode="after")
    def _could_be_true(self) -> Report:
        total = self.total_bytes
        for field in ("free_bytes", "kv_budget_bytes", "initial_free_bytes", "requested_bytes"):
            value = getattr(self, field)
            if total is not None and value is not None and value > total:
                raise impossible(
                    field,
                    value,
                    f"{field} {value} is above total_bytes {total}; measure both on the same"
                    " device (under MIG: the slice, never its parent)",
                )
        self._check_classes()
        return self

    def _check_classes(self) -> None:
        first: dict[str, CacheClass] = {}
        for c in self.classes:
            known = first.setdefault(c.name, c)
            for field in ("kind", "entries_per_req", "extra_entries", "multiple_of"):
                ours, theirs = getattr(c, field), getattr(known, field)
                if ours != theirs:
                    raise impossible(
                        f"classes.{c.name}.{field}",
                        ours,
                        f"class {c.name!r} is declared twice with {field} {theirs} and {ours};"
                        " one name is one index space: give the second another name",
                    )
            sum_bytes = sum(other.entry_bytes for other in self.classes if other.name == c.name)
            if sum_bytes >= INT_LIMIT:
                raise impossible(
                    f"classes.{c.name}.entry_bytes",
                    sum_bytes,
                    f"the declarations of class {c.name!r} add up to {sum_bytes} bytes an entry;"
                    " sizes end below 2^53: correct them",
                )
        pages = [c.name for c in first.values() if c.kind == "page"]
        if len(pages) > 1:
            raise impossible(
                "classes",
                pages,
                f"more than one page class: {pages}; only one can take what remains: declare one",
            )
        if self.max_num_seqs == 0 and (states := [c for c in self.classes if c.kind == "state"]):
            raise impossible(
                "max_num_seqs",
                0,
                f"state class {states[0].name!r} with max_num_seqs 0; a state class is sized per"
                " running sequence: send max_num_seqs of at least 1",
            )


class Launch(Message):
    """What all processes of one start share and no other start has."""

    run: Printable
    restart: Whole = 0
    source: Literal["env", "torchrun", "mpi", "slurm", "jobset", "ray", "lws", "master"] = "env"

    @property
    def comes_back(self) -> bool:
        """Whether a later start may be named the same: an address, a pid, a counter from 1."""
        return self.source in ("mpi", "ray", "lws", "master")

    def __str__(self) -> str:
        return f"{self.run} (restart {self.restart})"


class Device(Message):
    uuid: Text | None = None
    name: Text | None = None
    total_bytes: Bytes | None = None


Budget = Annotated[float, Field(gt=0, le=10**7, allow_inf_nan=False)]


class AskedEnds(Message):
    soft: Budget | None = None
    hard: Budget | None = None


class AskedBudgets(Message):
    """Shorter budgets than the policy's, in seconds; longer ones change nothing."""

    gather_s: Budget | None = None
    report_s: AskedEnds | None = None
    apply_s: AskedEnds | None = None


class Join(Message):
    """A process asks for an attempt number for the ranks it holds. Opens and binds nothing."""

    ranks: Annotated[tuple[Rank, ...], Field(min_length=1, max_length=MAX_WORLD, fail_fast=True)]
    layout: Layout = Layout()
    groups: dict[RankKey, Groups] | None = None  # of each of its ranks, where they are no grid
    nonce: Annotated[str, StringConstraints(pattern=r"^[A-Za-z0-9._:-]{8,64}$")]
    launch: Launch
    protocol: Positive = PROTOCOL
    mode: Literal["enforce", "observe"] = "enforce"
    inputs: OpenMap | None = None
    host: Annotated[str, StringConstraints(pattern=r"^[\x21-\x7e]{1,255}$")]
    pid: Positive
    engine_version: Text | None = None
    device: Device | None = None
    budgets: AskedBudgets | None = None

    @model_validator(mode="after")
    def _ranks_are_in_the_layout(self) -> Join:
        world = self.layout.world_size
        for rank in self.ranks:
            if rank >= world:
                raise impossible(
                    "ranks",
                    rank,
                    f"rank {rank} is outside the layout, whose world size is {world} (ranks 0 to"
                    f" {world - 1}); correct the rank or the layout",
                )
        if twice := [rank for rank, count in Counter(self.ranks).items() if count > 1]:
            raise impossible(
                "ranks", twice[0], f"rank {twice[0]} is named twice; name each rank once"
            )
        if self.groups is not None and (odd := set(self.ranks) ^ self.groups.keys()):
            raise impossible(
                "groups",
                min(odd),
                f"groups must name exactly the ranks of the join, and rank {min(odd)} stands in one"
                " of the two alone; give each rank its groups, or none of them",
            )
        return self


class Veto(Message):
    """A process's no. text: the innermost first exception; trace: the end of the traceback."""

    rank: Rank
    code: Name | None = None
    text: CauseText
    trace: Trace | None = None
    retryable: Annotated[bool, Strict()] = True


class Leave(Message):
    reason: Text | None = None


class Phase(Message):
    """What a process does now. progress only grows: weights read, batches profiled, graphs."""

    phase: Annotated[str, StringConstraints(min_length=1, max_length=64)]
    progress: Whole
    done: Whole | None = None
    total: Whole | None = None


class Reason(Message):
    """Why an operator ends something; stands in the log."""

    reason: Annotated[str, StringConstraints(min_length=1, max_length=500)]


class BuildFailed(Message):
    code: Name | None = None
    text: CauseText
    trace: Trace | None = None
    retryable: Annotated[bool, Strict()] = True


# Entries per class of all ranks of a process, or per rank where their rows differ.
Built = (
    Annotated[dict[Name, Whole], Field(max_length=32)]
    | Annotated[
        dict[RankKey, Annotated[dict[Name, Whole], Field(max_length=32)]],
        Field(min_length=1, max_length=MAX_WORLD),
    ]
)


def built_on(built: Built, rank: int, row: Mapping[str, int]) -> dict[str, int]:
    """What a process says that it built on one rank, whose row of the plan is `row`.

    Said once for all of its ranks, it holds for the classes that the rank has.
    """
    of_rank = built.get(rank)  # type: ignore[call-overload]
    if isinstance(of_rank, dict):
        return of_rank
    flat = {name: n for name, n in built.items() if isinstance(n, int)}
    return {name: flat[name] for name in row if name in flat}


def classes_in(built: Built) -> set[str]:
    """Every class name that is said to have been built."""
    names: set[str] = set()
    for key, value in built.items():
        names |= value.keys() if isinstance(value, dict) else {str(key)}
    return names


class Applied(Message):
    """What a process built from the plan, or how it failed."""

    digest: Annotated[str, StringConstraints(pattern=r"^sha256:[0-9a-f]{64}$")]
    built: Built | None = None
    failed: BuildFailed | None = None

    @model_validator(mode="after")
    def _one_of_both(self) -> Applied:
        if (self.built is None) == (self.failed is None):
            raise impossible(
                "built", self.built, "send either built {class: entries} or failed {text}"
            )
        return self
