"""Where elements lie: in memory of the host, as arrays, and on devices, to which and from which they are brought."""
