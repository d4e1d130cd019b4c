"""How `items` was made, by Orbax 0.12.8 and JAX 0.10.2 on four simulated CPU devices; its success files were removed.

XLA_FLAGS=--xla_force_host_platform_device_count=4 python make_items.py
"""

from __future__ import annotations

from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp
from jax.sharding import Mesh, NamedSharding, PartitionSpec

mesh = Mesh(np.array(jax.devices()).reshape(2, 2), ("x", "y"))
kernel = jax.device_put(jnp.arange(60.0).reshape(10, 6), NamedSharding(mesh, PartitionSpec("x", "y")))
items = {
    "params": ocp.args.StandardSave({"dense": {"kernel": kernel, "bias": jnp.ones(6, jnp.bfloat16)}}),
    "opt_state": ocp.args.StandardSave({"mu": {"dense": {"kernel": 2 * kernel}}, "count": jnp.array(3)}),
    "meta": ocp.args.JsonSave({"lr": 0.1, "names": ["a"]}),
}
with ocp.CheckpointManager(Path(__file__).parent / "manager") as manager:
    manager.save(7, args=ocp.args.Composite(**items))
