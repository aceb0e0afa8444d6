"""Measures the shapes of `quant bench kernels --device cuda` in torch and Triton, in the same way.

    bench_torch.py OURS.json OUT.jsonl

OURS.json is the output of `quant bench kernels --device cuda --json`. Each time is the median of several batches of
launches between two events. Launches take their weights, caches or rows in turn from copies, so that large ones are not
read from the L2 cache.
"""

import json
import sys

import torch

TURN_BYTES = 512 << 20
MAX_TURNS = 64
MIN_SECONDS = 0.05
REPEATS = 5


def seconds(launches):
    """Returns the median seconds per launch; `launches` are functions that are called in turn."""

    def run(count):
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        begin.record()
        for i in range(count):
            launches[i % len(launches)]()
        end.record()
        torch.cuda.synchronize()
        return begin.elapsed_time(end) / 1e3

    run(len(launches))
    once = run(len(launches)) / len(launches)
    count = min(max(int(MIN_SECONDS / max(once, 1e-7)), len(launches), 3), 20_000)
    return sorted(run(count) for _ in range(REPEATS))[REPEATS // 2] / count


def turns(bytes_each):
    return min(max(-(-TURN_BYTES // max(bytes_each, 1)), 1), MAX_TURNS)


def halves(*shape):
    return torch.randn(*shape, device="cuda", dtype=torch.float16)


def whole(*shape):
    return torch.randint(-127, 128, shape, device="cuda", dtype=torch.int8)


def dense(n, k, m):
    x = halves(m, k)
    weights = [halves(n, k) for _ in range(turns(n * k * 2))]
    return seconds([lambda w=w: torch.nn.functional.linear(x, w) for w in weights])


def int8(n, k, m):
    # cuBLASLt needs more than 16 rows, so fewer than 32 are measured as 32.
    x = whole(max(m, 32), k)
    weights = [whole(n, k) for _ in range(turns(n * k))]
    return seconds([lambda w=w: torch._int_mm(x, w.t()) for w in weights])


def int4(n, k, m):
    x = torch.randn(m, k, device="cuda", dtype=torch.bfloat16)
    codes = torch.randint(0, 256, (n, k // 2), device="cuda", dtype=torch.uint8)
    scales = torch.randn(k // 128, n, 2, device="cuda", dtype=torch.bfloat16)
    packed = torch._convert_weight_to_int4pack(codes, 8)
    weights = [packed.clone() for _ in range(turns(n * k // 2))]
    return seconds([lambda w=w: torch._weight_int4pack_mm(x, w, 128, scales) for w in weights])


def decode(sequences, tokens):
    q = halves(sequences, 32, 1, 128)
    size = sequences * 8 * tokens * 128
    caches = [(halves(sequences, 8, tokens, 128), halves(sequences, 8, tokens, 128)) for _ in range(turns(size * 4))]
    attend = torch.nn.functional.scaled_dot_product_attention
    return seconds([lambda c=c: attend(q, c[0], c[1], enable_gqa=True) for c in caches])


def triton_quantize():
    """Returns a function that times the quantization of rows to int8 by Triton, or `None` if Triton is missing."""
    try:
        import triton
        import triton.language as tl
    except ImportError:
        return None

    @triton.jit
    def kernel(x, codes, scales, k, BLOCK: tl.constexpr):
        row = tl.program_id(0).to(tl.int64)
        at = tl.arange(0, BLOCK)
        value = tl.load(x + row * k + at, mask=at < k, other=0.0).to(tl.float32)
        most = tl.max(tl.abs(value), axis=0)
        scaled = value * (127.0 / most)
        rounded = tl.where(scaled >= 0, scaled + 0.5, scaled - 0.5).to(tl.int8)
        tl.store(codes + row * k + at, rounded, mask=at < k)
        tl.store(scales + row, most / 127.0)

    def measure(m, k):
        block = triton.next_power_of_2(k)
        warps = min(max(block // 512, 2), 16)
        sets = [
            (halves(m, k), whole(m, k), torch.empty(m, device="cuda", dtype=torch.float32))
            for _ in range(turns(m * k * 3))
        ]
        return seconds([lambda s=s: kernel[(m,)](*s, k, BLOCK=block, num_warps=warps) for s in sets])

    return measure


def main(ours, out):
    quantize = triton_quantize()
    times = {}
    lines = json.load(open(ours))["kernels"]
    with open(out, "w") as results:
        results.write(json.dumps({"device": torch.cuda.get_device_name(), "torch": torch.__version__}) + "\n")
        print(f"{'kernel':28} {'shape':>14} {'tokens':>7} {'ours µs':>10} {'theirs µs':>10}  of")
        for line in lines:
            kernel, shape, m = line["kernel"], line["shape"], line["tokens"]
            numbers = [int(word) for word in shape.split(" x ")]
            if kernel.startswith("w"):
                peers = {"torch f16": (dense, *numbers, m)}
                peers |= {"torch int8": (int8, *numbers, m)} if "a8" in kernel else {"torch int4": (int4, *numbers, m)}
            elif kernel == "attention_decode_kv16":
                peers = {"torch sdpa": (decode, *numbers)}
            elif kernel == "quantize" and quantize:
                peers = {"triton": (quantize, m, numbers[0])}
            else:
                continue
            for name, (measure, *arguments) in peers.items():
                key = (name, *arguments)
                if key not in times:
                    try:
                        times[key] = measure(*arguments)
                    except (RuntimeError, AttributeError, NotImplementedError, TypeError) as e:
                        print(f"{name} {arguments}: {str(e).splitlines()[0]}")
                        times[key] = None
                    torch.cuda.empty_cache()
                theirs = times[key]
                if theirs is None:
                    continue
                print(f"{kernel:28} {shape:>14} {m:>7} {line['seconds'] * 1e6:>10.2f} {theirs * 1e6:>10.2f}  {name}")
                found = {"kernel": kernel, "shape": shape, "tokens": m, "peer": name, "seconds": theirs}
                results.write(json.dumps(found) + "\n")


if __name__ == "__main__":
    main(*sys.argv[1:3])
