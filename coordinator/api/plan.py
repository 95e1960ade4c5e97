"""Planning without a round: the same planner, nothing stored."""

from __future__ import annotations

import asyncio
from typing import Annotated

from fastapi import APIRouter, Response
from pydantic import Field

from coordinator.api.common import json_response
from coordinator.verdict import judge_reports
from kvaccord.errors import Invalid
from kvaccord.faulty import Message
from kvaccord.hints import hints
from kvaccord.layout import MAX_WORLD, Groups, Layout, named
from kvaccord.messages import Rank, Report

router = APIRouter()


class ReportRow(Report):
    rank: Rank
    groups: Groups | None = None

    def report(self) -> Report:
        return Report.model_construct(
            self.model_fields_set - {"rank", "groups"},
            **{name: getattr(self, name) for name in Report.model_fields},
        )


class PlanQuestion(Message):
    """What a round's ranks would report. spread_limit: as the policy of a round has it."""

    layout: Layout = Layout()
    spread_limit: Annotated[float, Field(gt=0, le=1)] | None = None
    reports: Annotated[
        tuple[ReportRow, ...], Field(min_length=1, max_length=MAX_WORLD, fail_fast=True)
    ]


@router.post("/v1/plan")
async def plan(body: PlanQuestion) -> Response:
    """What these reports would be decided to be, and what would pass instead where that fails.

    422 unless there is one report of every rank.
    """
    rows, groups = rows_of(body)
    verdict = judge_reports(body.layout, rows, {}, groups, spread_limit=body.spread_limit)
    answer = {"verdict": verdict.document()}
    if verdict.plan is not None:
        answer["plan"] = verdict.plan
    else:
        # Hints of a large start take a second of planning, and sessions must not wait for it.
        found = await asyncio.to_thread(
            hints, body.layout, rows, groups, spread_limit=body.spread_limit
        )
        answer |= found.document()
    return json_response(answer)


def rows_of(body: PlanQuestion) -> tuple[dict[int, Report], dict[int, Groups]]:
    """Reports and named groups, by rank. Raises Invalid without one report of every rank."""
    world = body.layout.world_size
    rows: dict[int, Report] = {}
    for row in body.reports:
        if row.rank in rows or row.rank >= world:
            what = "has two reports; send one" if row.rank in rows else "is outside the layout"
            raise Invalid(
                f"rank {row.rank} {what}; the layout's ranks are 0 to {world - 1}",
                rank=row.rank,
                field="reports",
                value=str(row.rank),
            )
        rows[row.rank] = row.report()
    if absent := [rank for rank in range(world) if rank not in rows]:
        raise Invalid(
            f"{named(absent)}: no report; a plan needs one report of every rank of the layout",
            rank=absent[0],
            field="reports",
            value="absent",
        )
    return rows, {row.rank: row.groups for row in body.reports if row.groups}
