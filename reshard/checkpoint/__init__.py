"""`open(path)`: any checkpoint, lazily."""
