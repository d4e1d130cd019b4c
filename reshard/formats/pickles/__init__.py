"""Pickles read without running any code."""
