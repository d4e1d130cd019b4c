"""The version, for the build, `reshard.__version__`, and manifests.

A separate module, so that the command line can print it without other imports.
"""

__all__ = ["__version__"]


__version__ = "0.2.0.dev0"
