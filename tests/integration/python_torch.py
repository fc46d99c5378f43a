# SPDX-License-Identifier: Apache-2.0
"""python_torch.py SOCKET FOLDER [cuda] - client/python/exl3_torch.py on CPU tensors, or on CUDA tensors too; FOLDER:
tiny-llama. Status 77: no PyTorch."""
import importlib.util
import json
import os
import sys

import exl3

try:
    import torch
except ImportError:
    print("PyTorch is not installed")
    sys.exit(77)
import exl3_torch  # noqa: E402


def refused(kind, call):
    try:
        call()
    except kind as e:
        return str(e)
    raise AssertionError(f"taken, not refused with {kind}")


def near(got, want):
    """Another number of rows may take another kernel: the same numbers, other last bits."""
    return got.shape == want.shape and ((got - want).abs() / (want.abs() + 1)).max() < 1e-5


def modules(client):
    module = client.model("layers").module("k4.mul1")
    layer, channel = exl3_torch.Linear(module), client.channel()
    torch.manual_seed(1)
    x = torch.randn(3, 5, module.k)
    arena = client.arena(1 << 20)
    ax, ay = arena.array("f4", (15, module.k)), arena.array("f4", (15, module.n))
    ax.bytes[:] = bytes(exl3_torch._bytes(x))
    channel.linear(module, ax, ay)
    want = torch.frombuffer(bytearray(ay.bytes), dtype=torch.float32).view(3, 5, module.n)
    assert torch.equal(layer(x), want), "another result than in an arena"
    for dtype, worst in ((torch.float16, 4e-3), (torch.bfloat16, 4e-2)):
        y = layer(x.to(dtype))
        assert y.dtype == dtype and ((y.float() - want).abs() / (want.abs() + 1)).max() < worst, f"{dtype}"
    assert near(layer(x.transpose(0, 1)), layer(x).transpose(0, 1)), "not contiguous"
    assert layer(x[0, 0]).shape == (module.n,) and layer(x[:0]).shape == (0, 5, module.n), "shapes"
    many = x[0, :1].expand(exl3_torch.ROWS + 7, -1)
    assert near(layer(many), want[0, :1].expand(len(many), -1)), "more rows than one request has"
    assert "columns are taken" in refused(ValueError, lambda: layer(x[..., :-1]))
    assert "float64" in refused(TypeError, lambda: layer(x.double()))
    assert "no backward" in refused(RuntimeError, lambda: layer(x.clone().requires_grad_()))
    with torch.no_grad():
        layer(x.clone().requires_grad_())

    # In a network: what has a name in the checkpoint is replaced, other layers stay.
    network = torch.nn.Module()
    network.k4 = torch.nn.Module()
    network.k4.mul1 = torch.nn.Linear(module.k, module.n, bias=False)
    network.own = torch.nn.Linear(4, 4)
    assert exl3_torch.replace_linear(network, client.model("layers")) == ["k4.mul1"], "replaced"
    assert torch.equal(network.k4.mul1(x), want) and isinstance(network.own, torch.nn.Linear)
    network.k4.mul1 = torch.nn.Linear(module.k, module.n + 1, bias=False)
    assert "the daemon's" in refused(ValueError, lambda: exl3_torch.replace_linear(network, client.model("layers")))
    network.k4.mul1 = torch.nn.Linear(module.k, module.n)
    assert "has a bias" in refused(ValueError, lambda: exl3_torch.replace_linear(network, client.model("layers")))


def on_the_gpu(client):
    """The same layer on tensors of the GPU: any memory, memory that the daemon knows, two streams, more rows than room."""
    module = client.model("layers").module("k4.mul1")
    layer = exl3_torch.Linear(module)
    torch.manual_seed(2)
    x = torch.randn(3, 5, module.k)
    want = layer(x)

    def near_gpu(got, what, worst=1e-4, expected=want):
        torch.cuda.synchronize()
        exl3_torch.check(client)
        off = ((got.float().cpu() - expected).abs() / (expected.abs() + 1)).max().item()
        assert off < worst, f"{what}: off by {off}"
    near_gpu(layer(x.cuda()), "f32")
    near_gpu(layer(x.cuda().half()), "f16", 4e-3)
    near_gpu(layer(x.cuda().bfloat16()), "bf16", 4e-2)
    near_gpu(layer(x.cuda().transpose(0, 1)).transpose(0, 1), "not contiguous")
    # More room than before, while what came before may still run.
    many = x[0, :1].expand(exl3_torch.ROWS + 7, -1)
    near_gpu(layer(many.cuda()), "more rows than one request has", expected=want[0, :1].expand(len(many), -1))
    # In the order of its stream: made by a kernel before it, read by one behind it.
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        y = layer(x.cuda() * 2) / 2
    near_gpu(y, "a stream of its own")
    # Memory that the daemon knows is read where it lies.
    arena = client.device_arena(1 << 20)
    known = torch.as_tensor(arena.array("f4", (15, module.k)), device="cuda")
    known.copy_(x.view(15, module.k))
    torch.cuda.synchronize()
    near_gpu(layer(known).view(3, 5, module.n), "memory that the daemon knows")
    # A call that fails is told about later, and the stream goes on.
    channel = exl3_torch._Lanes.of(client).streams[torch.cuda.current_stream().cuda_stream].channel
    channel.nop(stream=torch.cuda.current_stream().cuda_stream, timeout_ns=1)
    torch.cuda.synchronize()
    refused(exl3.Error, lambda: exl3_torch.check(client))
    near_gpu(layer(x.cuda()), "after a failure")


def whole_model(client, folder):
    with open(os.path.join(folder, "reference.json")) as f:
        reference = json.load(f)["logits"]
    with open(os.path.join(folder, reference["file"]), "rb") as f:
        want = torch.frombuffer(bytearray(f.read()), dtype=torch.float32).view(reference["shape"])
    network = exl3_torch.transformers_model(folder, client.model("tiny-llama"))
    assert sum(isinstance(m, exl3_torch.Linear) for m in network.modules()) == 43, "layers"
    with torch.no_grad():
        got = network(torch.tensor([reference["prompt_bytes"]])).logits[0]
    worst = (got - want).abs().max().item()
    assert worst < 1e-3, f"logits: off by {worst}"
    print(f"logits of Transformers' model: within {worst:.1e}")


def main():
    with exl3.Client(sys.argv[1], "python_torch") as client:
        if "cuda" in sys.argv[3:]:
            client.mps()
        modules(client)
        if "cuda" in sys.argv[3:]:
            on_the_gpu(client)
        if importlib.util.find_spec("transformers"):
            whole_model(client, sys.argv[2])
        else:
            print("skipped: Transformers is not installed")
    print("ok")


if __name__ == "__main__":
    main()
