"""The status page: plain HTML, no script, no asset from outside."""
