"""Inside training frameworks: a module each, which imports its framework and is imported by nothing of this package."""
