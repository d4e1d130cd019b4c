"""Who reads what of which saved chunk: load plans, their proof, and their items counted without listing."""
