from __future__ import annotations

import base64
import hashlib
from pathlib import Path

from fastapi import APIRouter, Request, Response
from jinja2 import Environment, FileSystemLoader, StrictUndefined

from coordinator.api.common import service_of
from coordinator.views import budget_row
from kvaccord import __version__
from kvaccord.layout import as_ranges

router = APIRouter()

_here = Path(__file__).parent
_templates = Environment(loader=FileSystemLoader(_here), autoescape=True, undefined=StrictUndefined)
_templates.filters["ranges"] = as_ranges
_style = (_here / "style.css").read_text()
_style_hash = base64.b64encode(hashlib.sha256(_style.encode()).digest()).decode()
HEADERS = {
    "Content-Security-Policy": f"default-src 'none'; style-src 'sha256-{_style_hash}';"
    " base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
    "Cache-Control": "no-store",
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
}


@router.get("/", include_in_schema=False)
async def status_page(request: Request) -> Response:
    """Every engine with its state, what it agreed on, and why not."""
    service = service_of(request)
    rows = [
        budget_row(e)
        | {"remaining_s": service.remaining_s(e.name, e.last) if e.last and e.last.open else None}
        for e in service.engines
    ]
    html = _templates.get_template("index.html").render(
        rows=rows, style=_style, version=__version__, store_id=service.store_id
    )
    return Response(html, media_type="text/html", headers=HEADERS)
