"""The verbs: each module or folder is one that users call."""
