"""Alias of `reshard.trace_layout`, which returns the layouts that your parallelization code creates
for any world size."""

from reshard.api.trace_layout import trace_layout as trace_layout
