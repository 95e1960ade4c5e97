"""Exit codes of every command, and of a rehearsed rank."""

PASSED = 0
USAGE = 1  # usage, and everything that is no verdict of a start
FAILED = 2  # FAILED or ABORTED; of several starts: one was not as expected
NO_VERDICT = 3
