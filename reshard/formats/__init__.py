"""The formats of other libraries: one module or folder each, with its files, names, optimizers, and
writer."""
