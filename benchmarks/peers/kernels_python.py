"""ONNX Runtime, OpenVINO and PyTorch as workers of `cargo study peers-kernels`.

    kernels_python.py onnxruntime|openvino|torch THREADS

Reads requests from standard input, one per line, and answers each with a line of JSON; the protocol is that of
`benchmarks/kernels-worker`. Each contestant is the peer's own product of float activations with quantized weights,
including its processing of the activations. In ONNX Runtime and OpenVINO, weights that are read in turn form one graph,
so the cost of starting a graph from Python, which is not part of a kernel, matters little.
"""

import importlib.metadata
import json
import os
import sys
import time
import warnings

import numpy as np

# The number of distinct weight rows. Further rows repeat them. In ONNX Runtime and OpenVINO, each copy begins with a
# different row, because they may store identical weights only once.
BASE = 128


def weights(k):
    """Returns [BASE, k], normally distributed with a standard deviation of 0.02."""
    return np.random.default_rng(k).standard_normal((BASE, k), dtype=np.float32) * np.float32(0.02)


def repeated(rows, n):
    """Repeats the rows to get n rows."""
    return np.ascontiguousarray(np.tile(rows, (-(-n // BASE),) + (1,) * (rows.ndim - 1))[:n])


def symmetric(base, group, bits):
    """Returns int8 codes [BASE, groups, group] from -2^(bits-1) to 2^(bits-1) - 1, and scales [BASE, groups]."""
    half = 1 << (bits - 1)
    groups = base.reshape(BASE, -1, group)
    at = np.abs(groups).argmax(axis=2)
    extreme = np.take_along_axis(groups, at[..., None], axis=2)[..., 0]
    # The value of largest magnitude maps to the most negative code.
    scales = (extreme / -half).astype(np.float32)
    codes = np.clip(np.rint(groups / scales[..., None]), -half, half - 1).astype(np.int8)
    return codes, scales


def nibbles(codes):
    """Packs pairs of 4-bit codes into bytes, the first one in the low nibble."""
    low, high = codes[..., 0::2].astype(np.uint8) & 15, codes[..., 1::2].astype(np.uint8) & 15
    return low | high << 4


class OnnxRuntime:
    """MatMulNBits, which quantizes activations to 8 bits at accuracy level 4."""

    package = "onnxruntime"
    contestants = ["q4-b32", "q4-b128"]

    def __init__(self, name, n, k, rotate, threads):
        import onnx
        import onnxruntime

        block = int(name.rsplit("b", 1)[1])
        codes, scales = symmetric(weights(k), block, 4)
        packed = repeated(nibbles(codes + 8), n)
        scales = repeated(scales, n)
        self.bytes = n * k // 2 + n * k // block * 4
        self.copies = -(-rotate // self.bytes)
        self.note = ""

        def session(copies):
            helper, numpy_helper = onnx.helper, onnx.numpy_helper
            nodes, initializers, outputs = [], [], []
            for i in range(copies):
                initializers += [
                    numpy_helper.from_array(np.roll(packed, i, axis=0), f"w{i}"),
                    numpy_helper.from_array(np.roll(scales, i, axis=0).reshape(-1), f"s{i}"),
                ]
                nodes.append(
                    helper.make_node(
                        "MatMulNBits", ["x", f"w{i}", f"s{i}"], [f"y{i}"], domain="com.microsoft",
                        N=n, K=k, bits=4, block_size=block, accuracy_level=4,
                    )
                )
                outputs.append(helper.make_tensor_value_info(f"y{i}", onnx.TensorProto.FLOAT, ["m", n]))
            x = helper.make_tensor_value_info("x", onnx.TensorProto.FLOAT, ["m", k])
            graph = helper.make_graph(nodes, "products", [x], outputs, initializers)
            opsets = [helper.make_opsetid("", 21), helper.make_opsetid("com.microsoft", 1)]
            model = helper.make_model(graph, opset_imports=opsets, ir_version=10)
            options = onnxruntime.SessionOptions()
            options.intra_op_num_threads = threads
            options.inter_op_num_threads = 1
            options.log_severity_level = 3
            # Threads spin for work during a run and sleep after it.
            options.add_session_config_entry("session.force_spinning_stop", "1")
            made = onnxruntime.InferenceSession(
                model.SerializeToString(), options, providers=["CPUExecutionProvider"]
            )
            return made, copies

        self.sessions = {True: session(self.copies), False: session(1)}

    def tokens(self, x, rotate):
        import onnxruntime

        self.session, self.count = self.sessions[rotate]
        self.binding = self.session.io_binding()
        self.binding.bind_ortvalue_input("x", onnxruntime.OrtValue.ortvalue_from_numpy(x))
        n = self.session.get_outputs()[0].shape[1]
        self.outputs = []
        for i in range(self.count):
            out = onnxruntime.OrtValue.ortvalue_from_numpy(np.zeros((len(x), n), np.float32))
            self.binding.bind_ortvalue_output(f"y{i}", out)
            self.outputs.append(out)

    def run(self):
        self.session.run_with_iobinding(self.binding)

    def out(self):
        return self.outputs[-1].numpy()

    def first_row(self):
        return -(self.count - 1)


class OpenVino:
    """A product with compressed weights, which quantizes activations to 8 bits in groups."""

    package = "openvino"
    contestants = ["i4-g128"]

    def __init__(self, name, n, k, rotate, threads):
        import openvino
        from openvino import opset13 as ops

        group = int(name.rsplit("g", 1)[1])
        codes, scales = symmetric(weights(k), group, 4)
        packed = repeated(nibbles(codes), n)
        scales = repeated(scales, n).astype(np.float16)[..., None]
        self.bytes = n * k // 2 + n * k // group * 2
        self.copies = -(-rotate // self.bytes)
        core = openvino.Core()

        def compiled(copies):
            x = ops.parameter([-1, k], np.float32, name="x")
            products = []
            for i in range(copies):
                rows = np.roll(packed, i, axis=0)
                tensor = openvino.Tensor(rows, [n, k // group, group], openvino.Type.i4)
                codes = ops.convert(ops.constant(tensor, shared_memory=False), np.float16)
                grouped = ops.multiply(codes, ops.constant(np.roll(scales, i, axis=0)))
                matrix = ops.convert(ops.reshape(grouped, [n, k], False), np.float32)
                products.append(ops.matmul(x, matrix, False, True))
            config = {
                "INFERENCE_NUM_THREADS": threads,
                "NUM_STREAMS": 1,
                "PERFORMANCE_HINT": "LATENCY",
                # By default, OpenVINO uses bf16 on processors that have it.
                "INFERENCE_PRECISION_HINT": "f32",
                "DYNAMIC_QUANTIZATION_GROUP_SIZE": str(group),
            }
            made = core.compile_model(openvino.Model(products, [x], "products"), "CPU", config)
            return made, copies

        self.models = {True: compiled(self.copies), False: compiled(1)}
        nodes = self.models[True][0].get_runtime_model().get_ops()
        kinds = [
            (i["layerType"].get(), i["primitiveType"].get())
            for i in (node.get_rt_info() for node in nodes)
            if "layerType" in i and "primitiveType" in i
        ]
        products = [primitive for layer, primitive in kinds if layer == "FullyConnected"]
        if len(products) != self.copies:
            raise RuntimeError(f"{len(products)} products, not {self.copies}: {sorted(set(kinds))}")
        self.note = ", ".join(sorted(set(products)))

    def tokens(self, x, rotate):
        import openvino

        model, self.count = self.models[rotate]
        self.request = model.create_infer_request()
        self.request.set_input_tensor(openvino.Tensor(x))

    def run(self):
        self.request.infer()

    def out(self):
        return self.request.get_output_tensor(self.count - 1).data

    def first_row(self):
        return -(self.count - 1)


class Torch:
    """8-bit linear layers of oneDNN and FBGEMM, which quantize activations by their range."""

    package = "torch"
    contestants = ["int8-onednn", "int8-fbgemm"]

    def __init__(self, name, n, k, rotate, threads):
        import torch

        warnings.filterwarnings("ignore", "torch.quantize_per")
        torch.set_num_threads(threads)
        torch.set_grad_enabled(False)
        self.torch = torch
        self.engine = name.split("-")[1]
        torch.backends.quantized.engine = self.engine
        base = weights(k)
        scales = torch.from_numpy(repeated(np.abs(base).max(axis=1) / np.float32(127), n))
        matrix = torch.from_numpy(repeated(base, n))
        zeros = torch.zeros(n, dtype=torch.int64)
        matrix = torch.quantize_per_channel(matrix, scales.double(), zeros, 0, torch.qint8)
        self.bytes = n * k + n * 4
        self.copies = -(-rotate // self.bytes)
        self.note = ""
        prepack = torch.ops.quantized.linear_prepack
        self.packed = [prepack(matrix, None) for _ in range(self.copies)]

    def tokens(self, x, rotate):
        self.x = self.torch.from_numpy(x)
        self.used = self.packed if rotate else self.packed[:1]
        self.count = len(self.used)

    def run(self):
        self.torch.backends.quantized.engine = self.engine
        product, x = self.torch.ops.quantized.linear_dynamic, self.x
        for packed in self.used:
            self.last = product(x, packed)

    def out(self):
        return self.last.numpy()

    def first_row(self):
        return 0


PEERS = {"onnxruntime": OnnxRuntime, "openvino": OpenVino, "torch": Torch}


def error(case, x, k):
    """Returns the relative error of some outputs, compared with the product of the unquantized weights: the root mean
    square of the difference divided by that of the product."""
    rows = [0, len(x) - 1]
    out = case.out()
    columns = np.concatenate([np.arange(BASE), np.arange(out.shape[1] - BASE, out.shape[1])])
    expected = x[rows].astype(np.float64) @ weights(k).astype(np.float64).T
    expected = expected[:, (columns + case.first_row()) % BASE]
    return float(np.sqrt(((out[rows][:, columns] - expected) ** 2).sum() / (expected**2).sum()))


def passes(case, milliseconds):
    """Runs passes until the time is over, and returns the seconds per product of each. The first pass is a warm-up and
    is dropped, unless it is the only one."""
    budget, started, taken = milliseconds / 1e3, time.perf_counter(), []
    while True:
        before = time.perf_counter()
        case.run()
        now = time.perf_counter()
        taken.append((now - before) / case.count)
        if now - started >= budget:
            return taken[1:] or taken


def main():
    peer, threads = PEERS[sys.argv[1]], int(sys.argv[2])
    version = importlib.metadata.version(peer.package)
    cases = {}
    # Keep the output of libraries out of the answers.
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)

    def answer(**values):
        answers.write(json.dumps(values) + "\n")

    answer(name=sys.argv[1], version=version, contestants=peer.contestants)
    for line in sys.stdin:
        words = line.split()
        request, name = words[0], words[1]
        try:
            if request == "prepare":
                n, k, rotate = (int(w) for w in words[2:5])
                cases[name] = (peer(name, n, k, rotate, threads), k)
                case = cases[name][0]
                answer(bytes=case.bytes, copies=case.copies, note=case.note)
            elif request == "tokens":
                case, k = cases[name]
                x = np.random.default_rng(1).standard_normal((int(words[2]), k), dtype=np.float32)
                case.tokens(x, words[3] == "1")
                case.run()
                answer(error=error(case, x, k))
            elif request == "run":
                answer(seconds=passes(cases[name][0], float(words[2])))
            elif request == "drop":
                del cases[name]
                answer()
            else:
                answer(failed=f"unknown request {request}")
        except Exception as failure:
            answer(failed=f"{type(failure).__name__}: {failure}")


main()
