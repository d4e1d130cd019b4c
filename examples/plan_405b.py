"""Plan Llama-3.1-405B with AdamW from 16,384 ranks to 12,288: `python examples/plan_405b.py [PAGE]`.

The plan follows from names, shapes, and two topologies. It needs no checkpoint, no GPU, no process group, and no torch.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator
from pathlib import Path

from planners import Cluster, TensorSpec, estimate, fsdp_tp, plan_reads, verify
from planners.units import format_bytes

DIM, FFN, KV, VOCAB, LAYERS = 16384, 53248, 1024, 128256, 126
LAYER = {"attention.wq": (DIM, DIM), "attention.wk": (KV, DIM), "attention.wv": (KV, DIM), "attention.wo": (DIM, DIM)}
LAYER |= {"feed_forward.w1": (FFN, DIM), "feed_forward.w2": (DIM, FFN), "feed_forward.w3": (FFN, DIM)}
LAYER |= {"attention_norm": (DIM,), "ffn_norm": (DIM,)}


def tensors() -> Iterator[TensorSpec]:
    """Parameters in bfloat16, and two moments of each in float32."""
    shapes = {"tok_embeddings": (VOCAB, DIM), "norm": (DIM,), "output": (VOCAB, DIM)}
    shapes |= {f"layers.{i}.{name}": shape for i in range(LAYERS) for name, shape in LAYER.items()}
    for name, shape in shapes.items():
        yield TensorSpec(f"model.{name}.weight", shape, "bfloat16")
        for moment in ("exp_avg", "exp_avg_sq"):
            yield TensorSpec(f"optim.state.{name}.weight.{moment}", shape, "float32")


def main(page: str | None = None) -> None:
    specs = list(tensors())
    started = time.perf_counter()
    saved, wanted = fsdp_tp(2048, 8).layout(specs), fsdp_tp(768, 16).layout(specs)
    plan = plan_reads(saved, wanted)
    verify(plan).raise_if_failed()
    loads = plan.rank_bytes()
    seconds = time.perf_counter() - started
    ranks = f"{saved.world_size:,} -> {wanted.world_size:,} ranks"
    print(f"{len(specs):,} tensors, {ranks}: planned and proved in {seconds:.2f} s")
    print(f"{format_bytes(plan.total_bytes)} to read, at most {format_bytes(loads.max())} by one rank")
    cluster = Cluster(storage_read_bytes_per_s=2e9)
    print(estimate(plan, cluster))
    if page is not None:
        text = plan.to_html(source="FSDP 2,048 × TP 8", target="FSDP 768 × TP 16", cluster=cluster)
        Path(page).write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main(*sys.argv[1:])
