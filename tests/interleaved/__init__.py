"""Calls by simulated processes that are killed, paused, and refused by their disk, in any order: see `simulation`."""
