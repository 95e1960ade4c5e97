"""python -m tests.model [WORDS]: search the scopes and mistakes whose names hold WORDS."""

import sys

from tests.model.mistakes import MISTAKES, SCOPES, searched, shipped
from tests.model.search import explore

words = " ".join(sys.argv[1:])
for name in SCOPES:
    if words in name:
        print(f"{name}: {explore(shipped(name))}", flush=True)
for name, mistake in MISTAKES.items():
    if words in name:
        print(f"{name}: {searched(mistake)}", flush=True)
