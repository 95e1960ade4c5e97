"""Planning without a round: the same planner, nothing stored."""

from __future__ import annotations

from typing import Annotated

from fastapi import APIRouter, Response
from pydantic import Field

from coordinator.api.common import json_response
from coordinator.verdict import judge_reports
from kvaccord.errors import Invalid
from kvaccord.faulty import Message
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
    layout: Layout = Layout()
    reports: Annotated[tuple[ReportRow, ...], Field(min_length=1, max_length=MAX_WORLD)]


@router.post("/v1/plan")
async def plan(body: PlanQuestion) -> Response:
    """What these reports would be decided to be. 422 unless there is one report of every rank."""
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
    groups = {row.rank: row.groups for row in body.reports if row.groups}
    verdict = judge_reports(body.layout, rows, {}, groups)
    answer = {"verdict": verdict.document()}
    if verdict.plan is not None:
        answer["plan"] = verdict.plan
    return json_response(answer)
