"""The rules, a file for each kind of command; coordinator/round.py says which is asked."""
