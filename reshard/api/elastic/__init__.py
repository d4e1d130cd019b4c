"""Keeps a job's last states in the memory, or on the disks, of its hosts, and recovers them in any
topology. See docs/elastic.md."""

from reshard.api.elastic.generation import GatherReport, TierRestoreReport, TierSaveReport
from reshard.api.elastic.recover import gather
from reshard.api.elastic.tier import Tier

__all__ = ["GatherReport", "Tier", "TierRestoreReport", "TierSaveReport", "gather"]
