"""Megatron-core loads what we write in its format, and goes on: model and optimizer, in another layout, bit for bit.

Its own code does everything but what needs a GPU: tensors that it puts on one stay here, see `_on_cpu`.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import sys
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

import reshard
from tests import gloo
from tests.same import assert_same

pytestmark = [pytest.mark.gloo, pytest.mark.filterwarnings("ignore")]  # of the framework: not ours to mend

with warnings.catch_warnings(action="ignore"):
    reason = "megatron-core is not installed"
    pytest.importorskip("megatron.core.dist_checkpointing", reason=reason, exc_type=ImportError)


def _on_cpu() -> None:
    cpu, type_of = torch.device("cpu"), torch.Tensor.type
    torch.cuda.current_device = lambda: cpu  # type: ignore[assignment,return-value]
    torch.cuda.synchronize = lambda *a: None  # type: ignore[assignment]
    torch.Tensor.cuda = lambda self, *a, **k: self  # type: ignore[method-assign]
    torch.Tensor.type = lambda self, *a: type_of(self, *a) if a else type_of(self).replace("torch.", "torch.cuda.")  # type: ignore
    multiprocessing.current_process()._config["daemon"] = False  # type: ignore[attr-defined]  # its writer starts others
    make = torch.tensor
    torch.tensor = lambda *a, **k: make(*a, **{n: v for n, v in k.items() if n != "device"})  # type: ignore[assignment]


class _NoTracker:
    def fork(self, *args: Any, **kwargs: Any) -> Any:
        return contextlib.nullcontext()

    def is_initialized(self) -> bool:
        return True


class Job:
    """A GPT of two layers, and Adam; `distributed`: Megatron's own sharded optimizer."""

    def __init__(self, tp: int, distributed: bool) -> None:
        _on_cpu()
        from megatron.core import parallel_state
        from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
        from megatron.core.models.gpt import GPTModel
        from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
        from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
        from megatron.core.transformer import TransformerConfig

        for module in [m for name, m in sys.modules.items() if name.startswith("megatron")]:
            if hasattr(module, "get_cuda_rng_tracker"):
                module.get_cuda_rng_tracker = lambda *a, **k: _NoTracker()
        parallel_state.initialize_model_parallel(tp)
        config = TransformerConfig(
            num_layers=2, hidden_size=8, ffn_hidden_size=12, num_attention_heads=4, num_query_groups=2,
            use_cpu_initialization=True, normalization="RMSNorm", gated_linear_unit=True, add_bias_linear=False,
            add_qkv_bias=True, tensor_model_parallel_size=tp, params_dtype=torch.float32,
        )  # fmt: skip
        spec = get_gpt_layer_local_spec(normalization="RMSNorm")
        self.model = GPTModel(config, spec, 16, 8, share_embeddings_and_output_weights=False)
        sharded = DistributedDataParallelConfig(use_distributed_optimizer=distributed)
        wrapped = DistributedDataParallel(config, sharded, self.model)
        settings = OptimizerConfig(
            optimizer="adam", lr=0.5, use_distributed_optimizer=distributed, params_dtype=torch.float32
        )
        self.optimizer = get_megatron_optimizer(settings, [wrapped])
        self.metadata: dict[str, Any] = {"chained_optim_avoid_prefix": True, "singleton_local_shards": False}
        if distributed:
            self.metadata["distrib_optim_sharding_type"] = "fully_reshardable"
            self._keep_steps()

    def _keep_steps(self) -> None:
        """Adam of torch has its step among the states, of which this optimizer knows only Apex's and its own."""
        from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer

        put = DistributedOptimizer._set_main_param_and_optimizer_states
        inner = self.optimizer.optimizer

        def with_step(this: Any, param: Any, tensors: dict[str, Any]) -> None:
            group, order = this.model_param_group_index_map[param]
            state = this.optimizer.state[this.optimizer.param_groups[group]["params"][order]]
            put(this, param, {**tensors, "step": state["step"].clone()})

        DistributedOptimizer._set_main_param_and_optimizer_states = with_step
        for group in inner.param_groups:
            for p in group["params"]:
                zero = torch.zeros_like(p.data)
                inner.state[p] = {"step": torch.tensor(0.0), "exp_avg": zero, "exp_avg_sq": zero.clone()}

    def sharded(self, is_loading: bool) -> dict[str, Any]:
        model = self.model.sharded_state_dict(metadata=self.metadata)
        optimizer = self.optimizer.sharded_state_dict(model, is_loading=is_loading, metadata=self.metadata)
        return {"model": model, "optimizer": optimizer}

    def save(self, folder: Path) -> None:
        from megatron.core import dist_checkpointing

        if dist.get_rank() == 0:
            folder.mkdir()
        dist.barrier()
        more = {"iteration": 3, "checkpoint_version": 3.0, "content_metadata": self.metadata}
        dist_checkpointing.save({**self.sharded(False), **more}, str(folder))

    def load(self, folder: Path) -> int:
        from megatron.core import dist_checkpointing

        found = dist_checkpointing.load(self.sharded(True), str(folder))
        self.model.load_state_dict(found["model"])
        self.optimizer.load_state_dict(found["optimizer"])
        return int(found["iteration"])


def _trained(folder: Path) -> None:
    job = Job(1, distributed=False)
    torch.manual_seed(1)
    for _ in range(3):
        for param in job.model.parameters():
            param.main_grad.copy_(torch.randn(param.shape))  # type: ignore[attr-defined]
        job.optimizer.prepare_grads()
        job.optimizer.step_with_ready_grads()
    job.save(folder)


def _resumed(source: Path, target: Path, tp: int, distributed: bool) -> int:
    job = Job(tp, distributed)
    iteration = job.load(source)
    job.save(target)
    return iteration


def _values(folder: Path) -> dict[str, Any]:
    found = reshard.open(folder).normalized()
    states = {f"{fqn} {name}": v for fqn, of in found["optim"]["state"].items() for name, v in of.items()}
    read = {k: torch.as_tensor(v[...] if hasattr(v, "dtype") else v) for k, v in {**found["model"], **states}.items()}
    groups = [{**group, "params": sorted(group["params"]), "step": 0} for group in found["optim"]["param_groups"]]
    return {
        **{k: read[k] for k in sorted(read) if "fp32_param" not in k},
        "groups": sorted(map(_by_key, groups), key=str),
    }


def _by_key(group: dict[str, Any]) -> dict[str, Any]:
    return dict(sorted(group.items()))


def test_megatron_goes_on_from_what_we_wrote(tmp_path: Path) -> None:
    """Megatron's own save, through our format, into Megatron's on another layout and with another optimizer."""
    first, written = tmp_path / "first", tmp_path / "written"
    gloo.run(_trained, 1, first)
    reshard.convert(first, tmp_path / "ours", normalized=True)
    reshard.convert(tmp_path / "ours", written, format="megatron")

    for tp, distributed in ((2, False), (1, True)):
        again = tmp_path / f"again-{tp}"
        assert gloo.run(_resumed, 2, written / "iter_0000003", again, tp, distributed) == [3, 3]
        assert_same(_values(again), _values(first))
