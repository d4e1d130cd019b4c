"""`reshard demo`: train a small transformer, change its topology twice, and prove that nothing was lost."""
