"""The pages say what is there: links, commands, codes and calls."""

import ast
import importlib
import re
import shlex
import textwrap
from pathlib import Path

import pytest
import typer

from cli.app import app as command
from coordinator.api import create_app
from coordinator.logs.memory import MemoryLog
from coordinator.service import Service
from kvaccord.errors import PROBLEMS

ROOT = Path(__file__).parents[1]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
PROTOCOL = (ROOT / "docs/protocol.md").read_text()
OPERATIONS = (ROOT / "docs/operations.md").read_text()
NOT_BUILT = "## Designed, not built yet"

pages = pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))


# Links


def anchor(heading):
    """What a heading is linked by. Source: GitHub's rendering of Markdown."""
    return re.sub(r"[^\w -]", "", heading.lower()).replace(" ", "-")


def outside_code(text):
    return re.sub(r"^ *```.*?^ *```", "", text, flags=re.S | re.M)


@pages
def test_every_relative_link_resolves(page):
    for target in re.findall(r"\]\(([^)]+)\)", outside_code(page.read_text())):
        if target.startswith(("http://", "https://")):
            continue
        path, _, fragment = target.partition("#")
        found = page.parent / path if path else page
        assert found.exists(), target
        if fragment:
            headings = re.findall(r"^#+ (.+)$", outside_code(found.read_text()), flags=re.M)
            assert fragment in map(anchor, headings), target


# Commands


def commands():
    group = typer.main.get_command(command)
    return {
        name: {option for parameter in found.params for option in parameter.opts} | {"--help"}
        for name, found in group.commands.items()
    }


def without_the_future(text):
    """A page less the table of what is not built."""
    before, _, after = text.partition(NOT_BUILT)
    return before + after.partition("\n## ")[2]


def quoted(text):
    """Code of a page: the lines of its blocks, and what stands between back-ticks."""
    text = without_the_future(text)
    blocks = re.findall(r"^ *```[a-z]*\n(.*?)^ *```", text, flags=re.S | re.M)
    return [line for b in blocks for line in b.splitlines()] + re.findall(
        r"`([^`\n]+)`", outside_code(text)
    )


def uses(line):
    """(subcommand, options) of every `kvaccord …` in a line of code."""
    for said in re.findall(r"(?<!from )(?<![\w/.])kvaccord ((?:[a-z]|--)[^|&;#]*)", line):
        words = shlex.split(said)
        yield words[0], [word.partition("=")[0] for word in words if word.startswith("--")]


@pages
def test_every_command_and_option_exists(page):
    there = commands()
    for line in quoted(page.read_text()):
        for name, options in uses(line):
            assert name in there, line
            assert set(options) <= there[name], line


def test_every_option_named_alone_belongs_to_a_command():
    anywhere = set().union(*commands().values())
    for page in PAGES:
        for span in re.findall(r"`(--[a-z][a-z-]*)", without_the_future(page.read_text())):
            # Of torchrun, named where its launch is explained.
            assert span in anywhere | {"--rdzv-id"}, (page.name, span)


def test_every_setting_of_serve_is_explained_with_its_default():
    table = OPERATIONS.partition("## Settings of")[2].partition("\n\nFixed for now")[0]
    rows = dict(re.findall(r"^\| `(--[a-z-]+)` \| ([^|]+) \|", table, flags=re.M))
    serve = typer.main.get_command(command).commands["serve"]
    options = {p.opts[0]: p.default for p in serve.params if p.opts[0] != "--help"}
    assert rows.keys() == options.keys()
    for name, default in options.items():
        said = rows[name].strip("` ")
        assert said == {None: "none", False: "off"}.get(default, str(default)), name


@pages
def test_python_in_a_page_compiles_and_imports_what_exists(page):
    for block in re.findall(r"^ *```python\n(.*?)^ *```", page.read_text(), flags=re.S | re.M):
        tree = ast.parse(textwrap.dedent(block))
        for node in ast.walk(tree):
            if isinstance(node, ast.ImportFrom):
                module = importlib.import_module(node.module)
                assert all(hasattr(module, name.name) for name in node.names), block


@pages
def test_every_make_target_exists(page):
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), flags=re.M))
    for line in quoted(page.read_text()):
        if found := re.match(r"make ([a-z-]+)", line):
            assert found[1] in targets, line


# Codes


def strings_for(source, name):
    """Every literal that may become `name`: an argument, a variable, or an element of a tuple."""
    for node in ast.walk(ast.parse(source)):
        match node:
            case ast.keyword(arg=arg, value=value) if arg == name:
                yield from literals(value)
            case ast.Assign(targets=[ast.Name(id=target)], value=value) if target == name:
                yield from literals(value)


def literals(node):
    match node:
        case ast.Constant(value=str(text)):
            yield text
        case ast.IfExp(body=body, orelse=orelse):
            yield from literals(body)
            yield from literals(orelse)


def codes_as_arguments(source, function, index):
    """Literals that stand at `index` in calls of `function`."""
    for node in ast.walk(ast.parse(source)):
        match node:
            case ast.Call(func=ast.Name(id=called), args=args) if called == function:
                if len(args) > index:
                    yield from literals(args[index])


def verdict_codes():
    """Every code that a decision or an outcome can carry, read from the source."""
    rules = [path.read_text() for path in sorted((ROOT / "coordinator/rules").glob("*.py"))]
    judge = (ROOT / "coordinator/verdict.py").read_text()
    planner = (ROOT / "kvaccord/plan.py").read_text()
    return {
        *(code for file in rules for code in strings_for(file, "code")),
        *(code for file in rules for code in codes_as_arguments(file, "objected", 2)),
        *(code for file in rules for code in codes_as_arguments(file, "_said_no", 3)),
        *(code for file in rules for code in codes_as_arguments(file, "Verdict", 1)),
        *strings_for(judge, "code"),
        *codes_as_arguments(judge, "Verdict", 1),
        *codes_as_arguments(planner, "Finding", 0),
    }


def first_cells(page, heading):
    """The codes in the first column of the tables of a section."""
    section = page.partition(f"\n## {heading}")[2].partition("\n## ")[0]
    rows = re.findall(r"^\| (`[^|]+`) \|", section, flags=re.M)
    return {code for row in rows for code in re.findall(r"`([a-z_]+)`", row)}


def test_the_source_yields_the_codes_that_are_known():
    # A guard of the reading above, not of the pages.
    assert {
        "agreed",
        "sealed",
        "does_not_fit",
        "inputs_disagree",
        "rank_vetoed",
        "apply_failed",
        "applied_differently",
        "rank_left",
        "rank_lost",
        "rank_replaced",
        "duplicate_rank",
        "ranks_missing",
        "superseded",
        "no_free_memory",
        "reserve_exceeds_free",
    } <= verdict_codes()


@pytest.mark.parametrize(
    ("page", "heading"), [(PROTOCOL, "5. Codes"), (OPERATIONS, "What a verdict means")]
)
def test_a_page_has_every_code_and_no_other(page, heading):
    assert first_cells(page, heading) == verdict_codes() | PROBLEMS.keys()


def test_the_status_of_a_problem_is_the_one_that_is_served():
    rows = re.findall(r"^\| `([a-z_]+)` \| ([0-9]{3}) \|", PROTOCOL, flags=re.M)
    assert {code: int(status) for code, status in rows} == {
        code: kind.http_status for code, kind in PROBLEMS.items()
    }


# Calls


def routes(router):
    """(method, path) of everything that is served, in routers within routers too."""
    for route in router.routes:
        if inner := getattr(route, "original_router", None):
            yield from routes(inner)
        elif methods := getattr(route, "methods", None):
            yield from ((method, route.path) for method in methods - {"HEAD"})


def test_the_table_has_every_call_that_is_served_and_no_other():
    table = PROTOCOL.partition("\n## 6. Calls")[2].partition("\n## ")[0]
    told = set(re.findall(r"^\| `(GET|POST|PUT|DELETE) (/[^`?]*)[^`]*` \|", table, flags=re.M))
    assert told == set(routes(create_app(Service(MemoryLog()))))


def test_every_metric_is_explained():
    told = set(re.findall(r"^ *\| `(kvaccord_[a-z_]+)", OPERATIONS, flags=re.M))
    app = create_app(Service(MemoryLog()))
    served = app.state.metrics.exposition().decode()
    assert told == set(re.findall(r"^# TYPE (\S+?)(?:_created)? ", served, flags=re.M))


# Words


def test_the_picture_stands_alone():
    picture = (ROOT / "docs/start.svg").read_text()
    assert "prefers-color-scheme: dark" in picture
    assert set(re.findall(r'https?://[^"\s)]+', picture)) == {"http://www.w3.org/2000/svg"}
