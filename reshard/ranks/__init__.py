"""Messages between ranks: verbs over small bytes, in which the first error reaches all ranks."""
