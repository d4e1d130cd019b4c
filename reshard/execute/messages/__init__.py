"""Bytes between ranks: the rounds of a transfer plan, sent and received."""
