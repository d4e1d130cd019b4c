"""A job's last states in the memory, or on the disks, of its hosts; recovery in any topology. See docs/elastic.md."""

from reshard.api.elastic.gathering import gather
from reshard.api.elastic.reports import GatherReport, KeepReport, RecoverReport
from reshard.api.elastic.tier import Tier

__all__ = ["GatherReport", "KeepReport", "RecoverReport", "Tier", "gather"]
