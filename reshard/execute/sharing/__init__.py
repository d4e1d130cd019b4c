"""Ranks of one machine that read for one another, through memory."""
