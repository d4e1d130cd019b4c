"""Who sends what to whom: transfer plans between ranks, their proof, and their rounds."""
