"""Folders in which every stage of a pipeline saved its own state."""
