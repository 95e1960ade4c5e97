"""The house: which room may import what, and which files are pure."""

import ast
import subprocess
import sys
from collections.abc import Iterator
from importlib.metadata import packages_distributions
from pathlib import Path
from typing import NamedTuple

import pytest

ROOT = Path(__file__).parents[1]
ROOMS = ("kvaccord", "coordinator", "worker_client", "reader", "verifier", "cli")

# A room that is not here may import what it likes, apart from what NEVER says.
ONLY = {
    "kvaccord": {"kvaccord", "pydantic", "pydantic_core"},  # pydantic_core: pydantic's own
    "worker_client": {"worker_client", "kvaccord", "httpx", "pydantic"},
    "reader": {"reader", "kvaccord"},  # logs are read anywhere, and never by an engine
    "verifier": {"verifier"},  # a second opinion shares nothing with the first
}
NEVER = {
    "coordinator": {"worker_client", "torch", "cli", "reader", "verifier"},
}
# Here, and nowhere else in its room, a function may import torch when it is called.
MEASURES = "worker_client/measure.py"
# Likewise an adapter, and nothing else, its engine; and the second opinion its library.
ADAPTERS = {"worker_client/engines/vllm/": "vllm", "worker_client/nvml.py": "pynvml"}
# For the tests of engines; nothing else of the house imports it.
TESTING = "worker_client/testing.py"

# What must be an argument instead.
CLOCKS_AND_IO = {"asyncio", "time", "random", "os", "socket"}
IMPURE = {
    "kvaccord/": CLOCKS_AND_IO,
    **{
        f"coordinator/{room}.py": CLOCKS_AND_IO | {"datetime", "sqlite3"}
        for room in (
            "round",
            "commands",
            "events",
            "engine",
            "verdict",
            "policy",
            "check",
            "hints",
            "views",
            "compaction",
        )
    },
    "coordinator/rules/": CLOCKS_AND_IO | {"datetime", "sqlite3"},
    "worker_client/flow.py": CLOCKS_AND_IO | {"httpx", "threading"},
    "worker_client/engines/vllm/numbers.py": CLOCKS_AND_IO | {"httpx", "threading"},
    "worker_client/reading.py": CLOCKS_AND_IO | {"httpx", "threading"},
    "worker_client/causes.py": CLOCKS_AND_IO | {"httpx", "threading"},
    "worker_client/goodbye.py": CLOCKS_AND_IO | {"httpx", "threading"},
    "verifier/": CLOCKS_AND_IO | {"sys", "pathlib"},
    "reader/engines/": CLOCKS_AND_IO | {"sys", "pathlib"},
    **{
        f"reader/{room}.py": CLOCKS_AND_IO | {"sys", "pathlib", "gzip"}
        for room in (
            "advice",
            "causes",
            "document",
            "judge",
            "lines",
            "notes",
            "numbers",
            "replay",
            "scan",
            "seats",
            "show",
            "sights",
            "start",
        )
    },
}

ASYNC = (ast.AsyncFunctionDef, ast.AsyncFor, ast.AsyncWith, ast.Await)


class Import(NamedTuple):
    line: int
    module: str  # the first part of the dotted name
    in_function: bool


def imports_in(node: ast.AST, room: str, in_function: bool = False) -> Iterator[Import]:
    match node:
        case ast.Import(names=names):
            for name in names:
                yield Import(node.lineno, name.name.partition(".")[0], in_function)
        case ast.ImportFrom(level=0, module=str(module)):
            yield Import(node.lineno, module.partition(".")[0], in_function)
        case ast.ImportFrom():  # relative: it cannot leave the room
            yield Import(node.lineno, room, in_function)
        case ast.FunctionDef() | ast.AsyncFunctionDef() | ast.Lambda():
            in_function = True
    for child in ast.iter_child_nodes(node):
        yield from imports_in(child, room, in_function)


def is_async(node: ast.AST) -> bool:
    return isinstance(node, ASYNC) or (isinstance(node, ast.comprehension) and bool(node.is_async))


def is_admitted(found: Import, room: str, path: str) -> bool:
    if found.module in NEVER.get(room, ()):
        return False
    if room not in ONLY or found.module in sys.stdlib_module_names | ONLY[room]:
        return True
    if path == TESTING and found.module == "pytest":
        return True
    if not found.in_function:
        return False
    if any(path.startswith(room) and found.module == e for room, e in ADAPTERS.items()):
        return True
    return found.module == "torch" and path == MEASURES


def faults_in(path: str, source: str) -> list[str]:
    """What this file does that its room does not admit, one sentence each."""
    tree = ast.parse(source)
    room = path.partition("/")[0]
    imports = list(imports_in(tree, room))
    faults = [
        f"{path}:{found.line}: {room} may not import {found.module}"
        for found in imports
        if not is_admitted(found, room, path)
    ]
    for pure, impure in IMPURE.items():
        if path.startswith(pure):
            faults += [
                f"{path}:{found.line}: a pure file may not import {found.module}"
                for found in imports
                if found.module in impure
            ]
            if any(map(is_async, ast.walk(tree))):
                faults.append(f"{path}: a pure file waits for nothing")
    return faults


FILES = sorted(str(p.relative_to(ROOT)) for room in ROOMS for p in (ROOT / room).rglob("*.py"))


@pytest.mark.parametrize("path", FILES)
def test_a_file_keeps_to_its_room(path):
    assert faults_in(path, (ROOT / path).read_text()) == []


@pytest.mark.parametrize("named", [*ROOMS, *IMPURE, *ADAPTERS, MEASURES, TESTING])
def test_the_table_names_what_is_there(named):
    assert any(path.startswith(named) for path in FILES)


@pytest.mark.parametrize(
    ("path", "source"),
    [
        ("kvaccord/plan.py", "import httpx"),
        ("kvaccord/plan.py", "from coordinator.round import decide"),
        ("kvaccord/plan.py", "from time import monotonic"),
        ("kvaccord/plan.py", "def f():\n    import os.path"),
        ("kvaccord/plan.py", "async def f(): ..."),
        ("coordinator/service.py", "from worker_client import flow"),
        ("coordinator/service.py", "import cli"),
        ("coordinator/logs/etcd.py", "def f():\n    import torch"),
        ("coordinator/round.py", "import datetime"),
        ("coordinator/rules/findings.py", "import time"),
        ("coordinator/rules/calls.py", "import sqlite3"),
        ("coordinator/round.py", "async def f():\n    return [x async for x in y]"),
        ("worker_client/client.py", "import coordinator"),
        ("worker_client/client.py", "import reader"),
        ("coordinator/service.py", "import reader"),
        ("verifier/check.py", "from kvaccord.plan import plan"),
        ("reader/judge.py", "import time"),
        ("reader/files.py", "import rich"),
        ("worker_client/client.py", "import anyio"),
        ("worker_client/client.py", "def f():\n    import torch"),
        ("worker_client/client.py", "def f():\n    import vllm"),
        ("worker_client/engines/vllm/attend.py", "import vllm"),
        ("worker_client/measure.py", "import torch"),
        ("worker_client/measure.py", "if True:\n    from torch import cuda"),
        ("worker_client/flow.py", "import threading"),
        ("worker_client/flow.py", "import httpx"),
        ("worker_client/client.py", "import pytest"),
    ],
)
def test_a_planted_fault_is_found(path, source):
    assert len(faults_in(path, source)) == 1


@pytest.mark.parametrize(
    ("path", "source"),
    [
        ("kvaccord/plan.py", "import math\nfrom pydantic import Field\nfrom . import layout"),
        ("coordinator/service.py", "import asyncio, time\nfrom kvaccord.plan import plan"),
        ("worker_client/measure.py", "def f():\n    import torch.cuda"),
        ("worker_client/client.py", "import threading, httpx\nfrom .flow import agree"),
        ("worker_client/engines/vllm/attend.py", "def f():\n    from vllm.v1 import core"),
        ("cli/__init__.py", "import coordinator, worker_client"),
    ],
)
def test_what_a_room_admits_is_no_fault(path, source):
    assert faults_in(path, source) == []


# What an engine's process gets when it imports the client.
CLIENT = "from worker_client import Rendezvous"


def printed_by(code: str) -> str:
    return subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, check=True, capture_output=True, text=True
    ).stdout


def distributions_loaded_by(code: str) -> set[str]:
    """Modules that belong to no distribution are the standard library's, or this house's."""
    loaded = printed_by(f"{code}\nimport sys\nprint(*sys.modules)").split()
    owners = packages_distributions()
    return {owner for name in loaded for owner in owners.get(name.partition(".")[0], ())}


def test_the_client_loads_nothing_that_httpx_and_pydantic_do_not():
    # Both load some of their own requirements at the first use only, so each is used once.
    both = """
import httpx, pydantic
httpx.Client().close()
pydantic.create_model("Model", n=(int, pydantic.Field(ge=0)))
"""
    usual = distributions_loaded_by(both)
    assert {"httpx", "pydantic"} <= usual
    assert distributions_loaded_by(CLIENT) - usual <= {"kvaccord"}


def test_importing_the_client_starts_no_thread():
    code = f"{CLIENT}; import threading; print(threading.active_count())"
    assert printed_by(code) == "1\n"


def test_importing_the_client_configures_no_logging():
    code = """
import logging
from worker_client import Rendezvous
loggers = [logging.root, *map(logging.getLogger, [*logging.root.manager.loggerDict])]
print([l.name for l in loggers for h in l.handlers if not isinstance(h, logging.NullHandler)])
print(logging.root.level == logging.WARNING)
"""
    assert printed_by(code) == "[]\nTrue\n"


def test_the_entry_point_of_an_adapter_loads_nothing_without_a_coordinator():
    code = """
import os
os.environ.pop("KVACCORD_URL", None), os.environ.pop("KVACCORD_MODE", None)
from worker_client.engines.vllm import register
register()
import sys
ours = {"kvaccord", "worker_client", "pydantic"}
print(*sorted(name for name in sys.modules if name.partition(".")[0] in ours))
"""
    loaded = "worker_client worker_client.engines worker_client.engines.vllm"
    assert printed_by(code) == f"{loaded}\n"
