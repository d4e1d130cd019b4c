"""The `reshard` command, with one module per command."""

from __future__ import annotations

import json
import os
import sys

from reshard import __version__

__all__ = ["main"]

_INTERRUPTED = 130
_NEEDED = {"torch": "'torch>=2.6'"}


def main() -> None:
    """Entry point of the console script."""
    if sys.argv[1:] == ["--version"]:  # whatever is installed beside it
        print(f"reshard {__version__}")
        return
    try:
        from reshard.cli.app import in_a_pipeline, run

        with in_a_pipeline():
            run()
    except ModuleNotFoundError as error:
        if "--traceback" in sys.argv:
            sys.excepthook(*sys.exc_info())
        missing = f"{error.name}".partition(".")[0]  # an older torch may lack parts that are used here
        message = f"this command needs {missing}: pip install {_NEEDED.get(missing, missing)}"
        if "--json" in sys.argv:  # as in reshard.cli.app, which may be what cannot be imported
            print(json.dumps({"ok": False, "error": {"kind": "ModuleNotFoundError", "message": message}}, indent=2))
        print(f"error: {message}", file=sys.stderr)
        sys.exit(3)
    except KeyboardInterrupt:  # between the commands' own handling, such as while modules are imported
        _leave()
    except SystemExit as end:
        if end.code == _INTERRUPTED:
            _leave()
        raise


def _leave() -> None:
    """End at once. Everything is cleaned up, and unloading torch would take longer than a second."""
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(_INTERRUPTED)
