"""The public functions: each has a module or folder."""
