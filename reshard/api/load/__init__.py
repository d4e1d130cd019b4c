"""`load`: a saved state into a live one."""
