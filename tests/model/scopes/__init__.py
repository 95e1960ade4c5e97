"""The worlds that are searched. README.md has a table of them."""
