"""Who reads, writes and sends what: plans of loads, saves and transfers, each with its proof beside it."""
