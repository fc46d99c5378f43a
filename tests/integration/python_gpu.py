# SPDX-License-Identifier: Apache-2.0
"""python_gpu.py - PyTorch and libexl3 in one process: tensors of both kinds, the current stream. usage: SOCKET"""
import sys

import exl3

try:
    import torch
except ImportError:
    print("no PyTorch")
    sys.exit(77)


def near(got, want, what):
    worst = ((got.float() - want.float()).abs() / (want.float().abs() + 1)).max().item()
    assert worst < 4e-3, f"{what}: off by {worst}"


def main():
    with exl3.Client(sys.argv[1], "python_gpu") as client:
        client.mps()
        module = client.model("layers").module("k4.mul1")
        channel, m = client.channel(16), 3
        host = client.arena(1 << 20)
        x, y = host.array("f4", (m, module.k)), host.array("f4", (m, module.n))
        torch.manual_seed(1)
        rows = torch.randn(m, module.k)
        x.bytes.cast("f")[:] = memoryview(rows.numpy().reshape(-1))
        channel.linear(module, x, y)
        want = torch.frombuffer(bytearray(y.bytes), dtype=torch.float32).reshape(m, module.n)

        # Tensors of PyTorch's own allocator, in its stream: x is made by a kernel in front, y is read by one behind.
        big = torch.zeros(1 << 22, dtype=torch.uint8, device="cuda")
        memory = client.register(big)
        tx = big[1 << 20:].view(torch.float16)[:m * module.k].view(m, module.k)
        ty = big[2 << 20:].view(torch.float32)[:m * module.n].view(m, module.n)
        stream = torch.cuda.Stream()
        with torch.cuda.stream(stream):
            tx.copy_(rows.cuda())
            call = channel.linear(module, tx, ty, stream=stream.cuda_stream)
            doubled = ty * 2
        stream.synchronize()
        assert channel.stream_error() is None and channel.stream_result(call).result == 0
        near(doubled.cpu() / 2, want, "tensors in a stream")

        # Memory that the daemon made, as tensors.
        arena = client.device_arena(1 << 20)
        ax, ay = arena.array("f4", (m, module.k)), arena.array("f4", (m, module.n))
        dx, dy = torch.as_tensor(ax, device="cuda"), torch.as_tensor(ay, device="cuda")
        assert dx.data_ptr() == ax.__cuda_array_interface__["data"][0], "copied"
        dx.copy_(rows)
        torch.cuda.synchronize()
        channel.linear(module, ax, ay)
        near(dy.cpu(), want, "an arena in GPU memory")
        for _ in range(200):
            channel.linear(module, dx, dy, stream=torch.cuda.current_stream().cuda_stream)
        torch.cuda.synchronize()
        assert channel.stream_error() is None
        near(dy.cpu(), want, "a chain of calls")

        try:
            channel.linear(module, torch.zeros(m, module.k, device="cuda"), dy)
            raise AssertionError("a tensor that nobody registered was taken")
        except exl3.Error as e:
            assert e.errno == 14 and "register" in str(e), e
        graph = torch.cuda.CUDAGraph()
        try:
            with torch.cuda.graph(graph):
                channel.linear(module, dx, dy, stream=torch.cuda.current_stream().cuda_stream)
            raise AssertionError("a stream that is being captured was taken")
        except exl3.Error as e:
            assert e.errno == 95 and "plan" in str(e), e
        memory.free()
    print("ok")


main()
