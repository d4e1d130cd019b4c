"""Executes plans: reads, shares, and exchanges bytes."""
