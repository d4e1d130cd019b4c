"""A job's last states in the memory, or on the disks, of its hosts; recovery in any topology. See docs/elastic.md."""

from reshard.api.elastic.generation import GatherReport, KeepReport, RecoverReport
from reshard.api.elastic.recover import gather
from reshard.api.elastic.tier import Tier

__all__ = ["GatherReport", "KeepReport", "RecoverReport", "Tier", "gather"]
