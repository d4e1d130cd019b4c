"""Plans of loads, saves, and transfers (which rank reads, writes, or sends what), each with its proof."""
