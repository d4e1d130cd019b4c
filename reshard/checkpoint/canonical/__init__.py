"""One canonical state out of any checkpoint: the names, shapes and param groups of the unsharded, unwrapped model."""
