"""The `reshard` command: one module a command."""

from __future__ import annotations

__all__ = ["main"]


def main() -> None:
    """Entry point of the console script."""
    from reshard.cli.app import run

    run()
