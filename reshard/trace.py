"""The layouts that a user's own parallelization code makes, for any world size: see `reshard.trace_layout`."""

from reshard.api.trace_layout import trace_layout as trace_layout
