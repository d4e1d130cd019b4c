"""Internals of the drop-in API: calls and their errors, torch's planning protocol, states, and
storages.
"""
