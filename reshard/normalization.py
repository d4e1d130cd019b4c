"""The former name of `reshard.state_dict`, with the same contents."""

from reshard.state_dict import *  # noqa: F403
