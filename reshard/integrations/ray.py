"""`RayExecutor`: a `concurrent.futures.Executor` whose workers are those of a Ray cluster. Ray
itself has none.

from reshard.errors import framework
from reshard.integrations.ray import RayExecutor

with RayExecutor("ray://head:10001") as executor:
    reshard.convert("s3://bucket/run/step-1000", "s3://bucket/hf", format="safetensors", executor=executor)
"""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Executor, Future, InvalidStateError, wait as wait_for
from contextlib import suppress
from typing import Any, TypeVar

from reshard.errors import framework

with framework("ray>=2.30"):
    import ray
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy


__all__ = ["RayExecutor"]


R = TypeVar("R")


class RayExecutor(Executor):
    """Runs each call as a Ray task. Ray retries the task if it loses a node or a worker.

    Args:
        address: address of the cluster. Default: the cluster that this process is connected to, or
            else a local one.
        options: passed to `ray.remote`, such as `num_cpus`, `max_retries`, `resources`, or
            `runtime_env`.
    """

    def __init__(self, address: str | None = None, **options: Any) -> None:
        self._connected = address is not None or not ray.is_initialized()
        if self._connected:
            ray.init(address=address, log_to_driver=False)
        self._options = {"num_cpus": 1, "max_retries": 3, **options}
        self._call = ray.remote(_call)
        self._under_way: set[Future[Any]] = set()
        self._is_shut = False

    def submit(self, fn: Callable[..., R], /, *args: Any, **kwargs: Any) -> Future[R]:
        """Run the function on a worker. The worker must be able to import it."""
        if self._is_shut:
            raise RuntimeError("cannot schedule new futures after shutdown")
        future: Future[R] = _RayFuture(self._call.options(**self._options).remote(fn, args, kwargs))
        self._under_way.add(future)
        future.add_done_callback(self._under_way.discard)
        return future

    def ask_each(self, function: Callable[[Any], Any], about: object) -> dict[str, Any]:
        """Call `function(about)` on one worker of each node that has CPUs. Return the results by
        node name. If a call fails, its exception is the result."""
        asked = {}
        for node in ray.nodes():
            if node["Alive"] and node["Resources"].get("CPU"):
                there = NodeAffinitySchedulingStrategy(node_id=node["NodeID"], soft=False)
                call = self._call.options(**{**self._options, "num_cpus": 0, "scheduling_strategy": there})
                name = f"{node['NodeManagerHostname']} (node {node['NodeID'][:8]})"
                asked[name] = call.remote(function, (about,), {})
        return {name: _answer(ref) for name, ref in asked.items()}

    def shutdown(self, wait: bool = True, *, cancel_futures: bool = False) -> None:
        """Stop accepting calls. Disconnect from Ray if this executor connected."""
        self._is_shut = True
        for future in list(self._under_way) if cancel_futures else []:
            future.cancel()
        if wait:
            wait_for(list(self._under_way))
        if self._connected and wait:
            self._connected = False
            ray.shutdown()


class _RayFuture(Future[R]):
    def __init__(self, ref: Any) -> None:
        super().__init__()
        self._ref = ref
        ref.future().add_done_callback(self._settle)

    def _settle(self, found: Future[R]) -> None:
        with suppress(InvalidStateError):  # the future was cancelled meanwhile
            error = found.exception()
            if error is None:
                self.set_result(found.result())
            else:
                self.set_exception(error)

    def cancel(self) -> bool:
        """Cancel the call. A call that has started is interrupted."""
        if self.done():
            return self.cancelled()
        ray.cancel(self._ref)
        return super().cancel() and not self.set_running_or_notify_cancel()  # notifies waiters


def _call(function: Callable[..., R], args: tuple[Any, ...], kwargs: dict[str, Any]) -> R:
    return function(*args, **kwargs)


def _answer(ref: Any) -> Any:
    try:
        return ray.get(ref)
    except Exception as error:  # Ray raises errors of any class
        return error
