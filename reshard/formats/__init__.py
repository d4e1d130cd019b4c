"""The formats of others: a module or a folder each, with its files, its names, its optimizer and its writer."""
