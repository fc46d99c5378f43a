# SPDX-License-Identifier: Apache-2.0
"""exl3_torch.py - layers of the daemon as modules of PyTorch, and a model of Transformers with them in it. Inference only.

    client = exl3.Client()                       # before CUDA is started, see Client.mps()
    llama = client.model("llama")
    layer = exl3_torch.Linear(llama.module("model.layers.0.self_attn.q_proj"))
    y = layer(x)                                 # x [..., k], on the CPU or the daemon's GPU; f32, f16 or bf16

    model = exl3_torch.transformers_model("/srv/models/llama", llama)   # reads config.json, no weights
    model.generate(...)

On the CPU a call waits for its result. On the GPU it is put into the current stream and waits for nothing; what
went wrong there is raised by a later call, or by check(). A tensor in memory that the daemon knows (Client.register(),
Client.device_arena()) is used where it lies, any other is copied through an arena; results always are new tensors.
Streams that are being captured are refused by the daemon's library.
"""
import contextlib
import ctypes
import errno

import torch

import exl3
import exl3_host

_CODES = {torch.float32: exl3.F32, torch.float16: exl3.F16, torch.bfloat16: exl3.BF16}
_SAFETENSORS = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16, "I64": torch.int64,
                "I32": torch.int32, "U8": torch.uint8, "BOOL": torch.bool}
ROWS = 512  # of one request; more are sent as several


def _bytes(tensor):
    """The memory of a contiguous CPU tensor; it lives as long as the tensor."""
    return (ctypes.c_ubyte * (tensor.numel() * tensor.element_size())).from_address(tensor.data_ptr())


class _Stream:
    """A channel for one CUDA stream, with memory of the GPU that requests go through. Whatever uses that memory is
    in the stream, so it may be used again at once."""

    def __init__(self, client, stream):
        self.client, self.stream = client, stream
        self.channel, self.arena, self.room = client.channel(64), None, (0, 0)

    def reserve(self, x_bytes, y_bytes):
        if x_bytes <= self.room[0] and y_bytes <= self.room[1]:
            return
        if self.arena:
            self.stream.synchronize()
            self.arena.free()
        self.room = max(x_bytes, self.room[0]), max(y_bytes, self.room[1])
        self.arena = self.client.device_arena(sum(self.room) + 128)
        arrays = [self.arena.array("e4m3", (size,)) for size in self.room]
        self.refs = [a.ref for a in arrays]
        self.tensors = [torch.as_tensor(a, device=self.stream.device) for a in arrays]  # of bytes

    def check(self):
        failed = self.channel.stream_error()
        if failed:
            raise exl3.Error(failed[0], f"call {failed[1]} of this stream has failed; its result and what was made of it are void")

    def linear(self, module, x, y):
        self.check()
        size = x.element_size()
        n = min(len(x), ROWS)
        self.reserve(n * module.k * size, n * module.n * size)
        for at in range(0, len(x), ROWS):
            part = x[at:at + ROWS]
            rows = len(part)
            try:
                operand = self.client.operand(part)
            except exl3.Error:  # memory that the daemon does not know
                self.tensors[0][:rows * module.k * size].view(x.dtype).view(rows, module.k).copy_(part)
                operand = exl3.Operand(self.refs[0], _CODES[x.dtype], (rows, module.k))
            self.channel.linear(module, operand, exl3.Operand(self.refs[1], _CODES[x.dtype], (rows, module.n)),
                                stream=self.stream.cuda_stream)
            y[at:at + rows].copy_(self.tensors[1][:rows * module.n * size].view(x.dtype).view(rows, module.n))


class _Lanes:
    """Of one client: one way for CPU tensors, one for each CUDA stream."""

    def __init__(self, client):
        self.client, self.host, self.streams = client, exl3_host.Rows(client, ROWS), {}

    @classmethod
    def of(cls, client):
        if not hasattr(client, "_torch_lanes"):
            client._torch_lanes = cls(client)
        return client._torch_lanes

    def linear(self, module, x):
        y = x.new_empty((len(x), module.n))
        if not len(x):
            return y
        if x.device.type == "cpu":
            self.host.linear(module, _CODES[x.dtype], _bytes(x), _bytes(y))
            return y
        stream = torch.cuda.current_stream(x.device)
        lane = self.streams.get(stream.cuda_stream)
        if lane is None:
            lane = self.streams[stream.cuda_stream] = _Stream(self.client, stream)
        lane.linear(module, x, y)
        return y


def check(client):
    """Raises exl3.Error if a call in a CUDA stream has failed since the last one that was told about. Synchronise the
    streams first."""
    for lane in _Lanes.of(client).streams.values():
        lane.check()


class Linear(torch.nn.Module):
    """A matrix (or fused group) of the daemon: y [..., n] = x [..., k] W, plus its bias if the checkpoint has one.
    It has no parameters of its own: the weights are the daemon's."""

    def __init__(self, module):
        super().__init__()
        if module.kind != exl3.LINEAR:
            raise ValueError(f"{module.name} is no linear layer")
        self._module, self._lanes = module, _Lanes.of(module.client)
        self.in_features, self.out_features = module.k, module.n
        self.has_bias = any(shard["bias"] for shard in module.shards)

    def forward(self, x):
        if torch.is_grad_enabled() and x.requires_grad:
            raise RuntimeError("the daemon's layers have no backward: use torch.no_grad()")
        if x.dtype not in _CODES:
            raise TypeError(f"{self._module.name}: x is {x.dtype}; f32, f16 or bf16 are taken")
        if not x.dim() or x.shape[-1] != self.in_features:
            raise ValueError(f"{self._module.name}: x is {tuple(x.shape)}, {self.in_features} columns are taken")
        y = self._lanes.linear(self._module, x.detach().reshape(-1, self.in_features).contiguous())
        return y.view(*x.shape[:-1], self.out_features)

    def extra_repr(self):
        bits = "/".join(f"{shard['bits']:g}" for shard in self._module.shards)
        return f"{self._module.name}, in_features={self.in_features}, out_features={self.out_features}, bits={bits}"


def replace_linear(network, model):
    """Puts the daemon's layers in the place of those torch.nn.Linear of @network that @model has under the same name.
    Returns the names that were replaced; others stay as they are. ValueError: one has another shape, or a bias that
    the checkpoint does not have."""
    replaced = []
    for name, child in list(network.named_modules()):
        if not isinstance(child, torch.nn.Linear):
            continue
        try:
            layer = Linear(model.module(name, exl3.LINEAR))
        except exl3.Error as e:
            if e.errno != errno.ENOENT:
                raise
            continue
        if (child.in_features, child.out_features) != (layer.in_features, layer.out_features):
            raise ValueError(f"{name} is [{child.in_features}, {child.out_features}], the daemon's "
                             f"[{layer.in_features}, {layer.out_features}]")
        if child.bias is not None and not layer.has_bias:
            raise ValueError(f"{name} has a bias, the daemon's has none")
        parent, _, leaf = name.rpartition(".")
        setattr(network.get_submodule(parent), leaf, layer)
        replaced.append(name)
    return replaced


@contextlib.contextmanager
def without_linear_weights():
    """What is made inside has no memory for the weights of its torch.nn.Linear."""
    init = torch.nn.Linear.__init__

    def on_meta(self, *args, **options):
        init(self, *args, **{**options, "device": "meta"})
    torch.nn.Linear.__init__ = on_meta
    try:
        yield
    finally:
        torch.nn.Linear.__init__ = init


def load_unquantized(network, model, dtype=None, device=None):
    """Copies the daemon's unquantized tensors into the parameters and buffers of @network that have their names;
    floating point as @dtype, all onto @device (default of both: as they are)."""
    for prefix, part in network.named_modules():
        for table in (part._parameters, part._buffers):
            for leaf, old in table.items():
                if old is None:
                    continue
                name = f"{prefix}.{leaf}" if prefix else leaf
                try:
                    found = model.tensor(name)
                except exl3.Error as e:
                    if e.errno != errno.ENOENT:
                        raise
                    continue
                copy = torch.frombuffer(bytearray(found.data), dtype=_SAFETENSORS[found.dtype]).view(found.shape)
                found.close()
                if copy.shape != old.shape:
                    raise ValueError(f"{name} is {tuple(old.shape)}, the daemon's {tuple(copy.shape)}")
                copy = copy.to(device=device, dtype=dtype if copy.is_floating_point() else None)
                table[leaf] = torch.nn.Parameter(copy, requires_grad=False) if table is part._parameters else copy


def transformers_model(folder, model, dtype=torch.float32, device="cpu"):
    """A causal language model of Transformers whose matrices are the daemon's and whose other tensors are copies of
    the daemon's. @folder: its config.json; no file with weights is read. RuntimeError: something has no weights."""
    from transformers import AutoConfig, AutoModelForCausalLM
    config = AutoConfig.from_pretrained(folder)
    if hasattr(config, "quantization_config"):
        del config.quantization_config  # that is done by the daemon
    with without_linear_weights():
        network = AutoModelForCausalLM.from_config(config)
    replace_linear(network, model)
    load_unquantized(network, model, dtype)
    network.tie_weights()
    void = [name for tensors in (network.named_parameters(), network.named_buffers()) for name, t in tensors if t.is_meta]
    if void:
        raise RuntimeError(f"model '{model.name}' of the daemon has nothing for {', '.join(void[:8])}")
    return network.to(device).eval()
