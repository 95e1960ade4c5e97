"""Reads startup logs of LLM engines: did the ranks agree, and is what they agreed on usable.

`files` does the reading; everything else here is pure. docs/read.md says what is recognised.
"""
