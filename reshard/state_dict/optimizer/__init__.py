"""Optimizer state: taken from live optimizers, in one form, and put back."""
