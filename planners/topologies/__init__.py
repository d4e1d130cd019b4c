"""Layouts of whole states from a few rules: topologies, ready ones, flat buffers."""
