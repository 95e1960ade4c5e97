"""python -m tests.model [WORDS]: search the scopes and mistakes whose names hold WORDS."""

import sys

from tests.model.mistakes import MISTAKES, SCOPES, searched
from tests.model.protocol import Rules, explore

words = " ".join(sys.argv[1:])
for name, scope in SCOPES.items():
    if words in name:
        print(f"{name}: {explore(scope(Rules()))}", flush=True)
for name, mistake in MISTAKES.items():
    if words in name:
        print(f"{name}: {searched(mistake)}", flush=True)
