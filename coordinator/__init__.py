"""The coordinator: the rules in round.py and rules/, the shell round them, HTTP in api/."""
