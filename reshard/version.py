"""Which release this is, written down here alone: the build, `reshard.__version__` and manifests have it from here.

A module by itself, since the command line prints it without importing anything else.
"""

__all__ = ["__version__"]


__version__ = "0.2.0.dev0"
