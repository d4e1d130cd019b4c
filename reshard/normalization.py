"""The names of `reshard.state_dict`, under the name that this package had in earlier releases."""

from reshard.state_dict import *  # noqa: F403
