"""Plans for people and for storage: figures, costs, differences, text, pages, and versioned JSON."""
