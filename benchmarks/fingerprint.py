"""How fast fingerprints are taken, beside a plain read of the same memory: `python -m benchmarks.fingerprint`.

On one CPU core; and on a CUDA device, beside its copy bandwidth, where there is one.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable

import torch

from reshard.state.fingerprints import fold, partial
from reshard.state.fingerprints.keys import Key

WANTED_GB_PER_S = 2.0
"""For bf16 and float32 on one core."""
WANTED_COPY_SHARE = 1 / 3
"""Of a CUDA device's copy bandwidth."""


def best_s(run: Callable[[], object], repeats: int, device: torch.device) -> float:
    """The shortest of some runs, in seconds, after one to warm up."""
    times = []
    for _ in range(repeats + 1):
        _wait(device)
        start = time.perf_counter()
        run()
        _wait(device)
        times.append(time.perf_counter() - start)
    return min(times[1:])


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def cases(nbytes: int, device: torch.device) -> list[tuple[str, torch.Tensor, list[list[tuple[int, int]]] | None]]:
    """(name, tensor, positions): the targets first, then what is harder."""
    words = torch.randint(-(2**62), 2**62, (nbytes // 8,), dtype=torch.int64, device=device)
    bf16, f32, u8 = words.view(torch.bfloat16), words.view(torch.float32), words.view(torch.uint8)
    n = bf16.numel()
    shifted = bf16[1 : n - 1]
    columns = bf16.view(-1, 4096)[:, :1000]
    return [
        ("bfloat16, rows of 4096", bf16.view(-1, 4096), None),
        ("float32, rows of 4096", f32.view(-1, 4096), None),
        ("bfloat16, 1-D", bf16, None),
        ("float32, 1-D", f32, None),
        ("float64, rows of 4096", words.view(torch.float64).view(-1, 4096), None),
        ("float8_e4m3fn, rows of 4096", u8.view(torch.float8_e4m3fn).view(-1, 4096), None),
        ("bfloat16, rows of 128", bf16.view(-1, 128), None),
        ("float32, (n, 256, 4, 4)", f32.view(-1, 256, 4, 4), None),
        ("bfloat16, columns 3000:4000 of 4096", columns, [[(0, columns.shape[0])], [(3000, 4000)]]),
        ("bfloat16, 1-D from an odd place", shifted, [[(1, n - 1)]]),
        ("bfloat16, (n, 1024, 3), rows end within words", bf16[: n // 3072 * 3072].view(-1, 1024, 3), None),
        ("float32, transposed", f32.view(4096, -1).t(), None),
    ]


def first_time_s(tensor: torch.Tensor) -> float:
    """The same for a process that has no numbers at hand: keys are made anew."""
    fold._limbs.cache_clear()
    start = time.perf_counter()
    partial(tensor, key=Key(str(start).encode()))
    _wait(tensor.device)
    return time.perf_counter() - start


def plain_s(nbytes: int, repeats: int, device: torch.device) -> tuple[float, float]:
    """Seconds to read so many bytes, and to copy them."""
    memory = torch.ones(nbytes // 8, dtype=torch.int64, device=device)
    target = torch.empty_like(memory)
    return best_s(memory.sum, repeats, device), best_s(lambda: target.copy_(memory), repeats, device)


def measure(device: torch.device, nbytes: int, repeats: int) -> None:
    """Print one line per case, and how the targets fare."""
    gb = nbytes / 1e9
    read, copy = (gb / seconds for seconds in plain_s(nbytes, repeats, device))
    threads = f", {torch.get_num_threads()} thread" if device.type == "cpu" else ""
    print(f"{device}{threads}, {nbytes >> 20} MiB: plain read (sum as int64) {read:.1f} GB/s, copy {copy:.1f} GB/s")
    print(f"{'':46}{'GB/s':>7}{'of read':>9}{'of copy':>9}{'first time':>12}")
    reached = []
    for index, (name, tensor, positions) in enumerate(cases(nbytes, device)):
        shape = None if positions is None else [max(dim)[1] for dim in positions]
        size_gb = tensor.numel() * tensor.itemsize / 1e9
        rate = size_gb / best_s(lambda t=tensor, p=positions, s=shape: partial(t, p, s), repeats, device)
        cold = f"{size_gb / first_time_s(tensor):.1f}" if positions is None else ""
        print(f"{name:46}{rate:7.2f}{rate / read:9.0%}{rate / copy:9.0%}{cold:>12}")
        if index < 2:
            reached.append(rate)
    if device.type == "cpu":
        verdict = "reached" if min(reached) >= WANTED_GB_PER_S else "MISSED"
        print(f"wanted: {WANTED_GB_PER_S} GB/s for bfloat16 and float32 on one core: {verdict} ({min(reached):.1f})")
    else:
        verdict = "reached" if min(reached) >= WANTED_COPY_SHARE * copy else "MISSED"
        print(f"wanted: a third of the copy bandwidth: {verdict} ({min(reached) / copy:.0%})")


def small_tensors() -> None:
    """The cost of a tensor that is not worth its bytes, such as a norm's weight."""
    tensors = [torch.randn(4096) for _ in range(200)]
    each = best_s(lambda: [partial(tensor) for tensor in tensors], 3, torch.device("cpu")) / len(tensors)
    print(f"a tensor of 4096 float32: {each * 1e6:.0f} µs")


def main() -> None:
    """Run on one CPU thread, and on the CUDA device if there is one."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--mib", type=int, default=256, help="size of the tensors (default 256)")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--quick", action="store_true", help="tensors of 32 MiB")
    options = parser.parse_args()
    options.mib = min(options.mib, 32) if options.quick else options.mib
    torch.set_num_threads(options.threads)
    measure(torch.device("cpu"), options.mib << 20, options.repeats)
    small_tensors()
    if torch.cuda.is_available():
        measure(torch.device("cuda"), options.mib * 8 << 20, options.repeats)


if __name__ == "__main__":
    main()
