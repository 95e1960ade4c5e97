"""The coordinator: rules in round.py, the shell round them, and the HTTP edge in api/."""
