"""A training run's checkpoints, managed by policies: when to save, what to keep, when to end. See
docs/manager.md."""

from reshard.api.manager.manager import CheckpointManager, RestoreReport, StepReport
from reshard.api.manager.sampler import ElasticSampler
from reshard.api.manager.save_policies import Every, Preemption
from reshard.api.retention import Keep

__all__ = ["CheckpointManager", "ElasticSampler", "Every", "Keep", "Preemption", "RestoreReport", "StepReport"]
