"""The `reshard` command: one module a command."""

from __future__ import annotations

__all__ = ["main"]


def main() -> None:
    """Entry point of the console script."""
    try:
        from reshard.cli.app import in_a_pipeline, run

        with in_a_pipeline():
            run()
    except KeyboardInterrupt:  # between the commands' own handling, such as while modules are imported
        raise SystemExit(130) from None
