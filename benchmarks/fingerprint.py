"""The speed of fingerprints: `python -m benchmarks.fingerprint [--quick]`.

Milliseconds for 256 MiB (32 with `--quick`) on one CPU core, for several dtypes and shapes, the usual ones first, and
for the first tensor of a shape, whose keys are not cached. The peer is a SHA-256 of the same bytes, which is not
independent of the layout. The floor is a copy of them. Then small tensors, such as a norm's weight, alone and among
many. If the compiled kernel is installed, each has a row with it and one without. With `--cuda`, the same on a
device, compared with its copy bandwidth.
"""

from __future__ import annotations

import functools
import hashlib
import sys
import time
from collections.abc import Callable, Iterator

import torch

from benchmarks.kernels import NAMED, compiled_kernel, is_installed
from benchmarks.page import Row, arguments, report
from reshard.live import fingerprint_arithmetic
from reshard.live.fingerprint_arithmetic import Key
from reshard.live.fingerprints import partial, partials

ROUNDS = 3
FIRST_CASE = "bfloat16, rows of 4096"


def best_s(run: Callable[[], object], repeats: int, device: torch.device) -> float:
    """Return the seconds of the fastest of some runs, after a warm-up."""
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
    """Return (name, tensor, positions): the targets first, then harder cases."""
    words = torch.randint(-(2**62), 2**62, (nbytes // 8,), dtype=torch.int64, device=device)
    bf16, f32, u8 = words.view(torch.bfloat16), words.view(torch.float32), words.view(torch.uint8)
    n = bf16.numel()
    shifted = bf16[1 : n - 1]
    columns = bf16.view(-1, 4096)[:, :1000]
    return [
        (FIRST_CASE, bf16.view(-1, 4096), None),
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
    """Return the seconds for a process without cached keys."""
    fingerprint_arithmetic._kept.clear()
    start = time.perf_counter()
    partial(tensor, key=Key(str(start).encode()))
    _wait(tensor.device)
    return time.perf_counter() - start


def rows(nbytes: int, repeats: int, device: torch.device) -> Iterator[Row]:
    """Yield a row for each case, and those of small tensors."""
    memory = torch.randint(-(2**62), 2**62, (nbytes // 8,), dtype=torch.int64, device=device)
    target = torch.empty_like(memory)
    name = "" if device.type == "cpu" else f"{device.type}, "

    def copy() -> float:
        return best_s(lambda: target.copy_(memory), repeats, device) * 1e3

    def secure() -> float:
        return best_s(lambda: hashlib.sha256(memory.numpy().data), 1, device) * 1e3

    loops = {"": False, NAMED: True} if device.type == "cpu" and is_installed() else {"": False}
    for case, tensor, positions in cases(nbytes, device):
        shape = None if positions is None else [max(dim)[1] for dim in positions]
        share = tensor.numel() * tensor.itemsize / nbytes
        ours: dict[str, list[float]] = {loop: [] for loop in loops}
        floor = []
        for _ in range(ROUNDS):
            for loop, wanted in loops.items():
                with compiled_kernel(wanted):
                    work = functools.partial(partial, tensor, positions, shape)
                    ours[loop].append(best_s(work, repeats, device) * 1e3 / share)
            floor.append(copy())
        peers = {"SHA-256": tuple(secure() for _ in floor)} if device.type == "cpu" and case == FIRST_CASE else {}
        for loop, wanted in loops.items():
            yield Row("fingerprint", f"{name}{case}{loop}", "ms", tuple(ours[loop]), peers, tuple(floor))
            if case == FIRST_CASE:
                with compiled_kernel(wanted):
                    cold = tuple(first_time_s(tensor) * 1e3 for _ in floor)
                yield Row("fingerprint", f"{name}{case}, first of its shape{loop}", "ms", cold, {}, tuple(floor))
    tensors = [torch.randn(4096, device=device) for _ in range(200)]
    for case, many in {
        "4096 float32, alone": lambda: [partial(tensor) for tensor in tensors],
        "4096 float32, among 200": lambda: partials((tensor, None, None) for tensor in tensors),
    }.items():
        for loop, wanted in loops.items():
            with compiled_kernel(wanted):
                each = tuple(best_s(many, 3, device) / len(tensors) * 1e3 for _ in range(ROUNDS))
            yield Row("fingerprint", f"{name}{case}{loop}", "ms", each)


def main() -> int:
    """Run on one CPU thread, or on the CUDA device."""
    parser = arguments(__doc__)
    parser.add_argument("--mib", type=int, default=256, help="size of the tensors (default 256)")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--cuda", action="store_true", help="on the CUDA device")
    options = parser.parse_args()
    mib = min(options.mib, 32) if options.quick else options.mib
    torch.set_num_threads(options.threads)
    device, more = (torch.device("cuda"), 8) if options.cuda else (torch.device("cpu"), 1)
    return report(rows(mib * more << 20, options.repeats, device), options.rows)


if __name__ == "__main__":
    sys.exit(main())
