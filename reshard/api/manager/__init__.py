"""A training run's checkpoints, kept by policy: when to save, what to keep, when to end. See docs/manager.md."""

from reshard.api.manager.manager import CheckpointManager, RestoreReport, StepReport
from reshard.api.manager.policies import Every, Keep, Preemption

__all__ = ["CheckpointManager", "Every", "Keep", "Preemption", "RestoreReport", "StepReport"]
