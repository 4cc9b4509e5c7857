"""A peer: torch.distributed.pipelining on a LLaMA-shaped model, compiled, bfloat16, one process a GPU (or CPU core):

    torchrun --nproc-per-node 4 benchmarks/torch_peer.py --layers 16 --dim 4096 --heads 32 --kv-heads 8 --hidden 14336 \
        --vocab 128256 --sequence 4096 --microbatch 1 --microbatches 32 --schedule 1f1b

A step is what ours is: forward and backward of all microbatches over float32 weights with bfloat16 compute and wire,
clipping to a global norm of 1, AdamW. The last line printed is a JSON object: tokens_per_second (of the median step),
step_seconds, loss, peak_bytes (the largest of any GPU).

Legend: B microbatch size, T sequence, D model, N heads, K kv heads, H head dim, V vocabulary; M microbatches.
"""

import argparse
import json
import os
import statistics
import time

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleGPipe, ScheduleInterleaved1F1B
from torch.nn import functional

SIZES = ("layers", "dim", "heads", "kv-heads", "hidden", "vocab", "sequence", "microbatch", "microbatches")
SCHEDULES = {"gpipe": ScheduleGPipe, "1f1b": Schedule1F1B, "interleaved": ScheduleInterleaved1F1B}
THETA, EPSILON, STD = 500_000.0, 1e-5, 0.02


def dense(inputs: int, outputs: int) -> nn.Linear:
    """A projection without a bias."""
    layer = nn.Linear(inputs, outputs, bias=False)
    nn.init.normal_(layer.weight, std=STD)
    return layer


class Norm(nn.Module):
    """RMS norm, taken in float32, in the dtype of its input."""

    def __init__(self, dim: int) -> None:
        super().__init__()
        self.gain = nn.Parameter(torch.ones(dim))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        wide = x.float()
        scale = torch.rsqrt(wide.square().mean(-1, keepdim=True) + EPSILON)
        return (wide * scale * self.gain).to(x.dtype)


def turned(x_BNTH: torch.Tensor, turn_2TH: torch.Tensor) -> torch.Tensor:
    """Rotary positions: the two halves of a head turned by angles, whose cosines and sines are [2, T, H/2]."""
    first, second = x_BNTH.float().chunk(2, dim=-1)
    cos, sin = turn_2TH
    return torch.cat([first * cos - second * sin, second * cos + first * sin], dim=-1).to(x_BNTH.dtype)


class Block(nn.Module):
    """Grouped-query attention and a gated MLP, each after a norm and added to the stream [B, T, D]."""

    def __init__(self, o: argparse.Namespace) -> None:
        super().__init__()
        head = o.dim // o.heads
        self.split = (o.heads * head, o.kv_heads * head, o.kv_heads * head)
        self.head, self.grouped = head, o.heads != o.kv_heads
        self.before_attention, self.before_mlp = Norm(o.dim), Norm(o.dim)
        self.qkv, self.merge = dense(o.dim, sum(self.split)), dense(o.heads * head, o.dim)
        self.gate_up, self.down = dense(o.dim, 2 * o.hidden), dense(o.hidden, o.dim)

    def forward(self, x_BTD: torch.Tensor, turn_2TH: torch.Tensor) -> torch.Tensor:
        joint = self.qkv(self.before_attention(x_BTD)).split(self.split, dim=-1)
        q, k, v = (part.unflatten(-1, (-1, self.head)).transpose(1, 2) for part in joint)
        q, k = turned(q, turn_2TH), turned(k, turn_2TH)
        mixed = functional.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=self.grouped)
        x_BTD = x_BTD + self.merge(mixed.transpose(1, 2).flatten(2))
        gate, up = self.gate_up(self.before_mlp(x_BTD)).chunk(2, dim=-1)
        return x_BTD + self.down(functional.silu(gate) * up)


class Chunk(nn.Module):
    """A run of layers; the first chunk has the embedding in front, the last one norm and head behind."""

    turn: torch.Tensor  # cosines and sines of the positions' angles, [2, T, H/2]

    def __init__(self, o: argparse.Namespace, layers: int, first: bool, last: bool) -> None:
        super().__init__()
        self.embed = nn.Embedding(o.vocab, o.dim) if first else None
        self.blocks = nn.ModuleList(Block(o) for _ in range(layers))
        self.head = nn.Sequential(Norm(o.dim), dense(o.dim, o.vocab)) if last else None
        half = torch.arange(o.dim // o.heads // 2) / (o.dim // o.heads // 2)
        angle_TH = torch.outer(torch.arange(o.sequence), THETA**-half)
        self.register_buffer("turn", torch.stack([angle_TH.cos(), angle_TH.sin()]), persistent=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with torch.autocast(x.device.type, torch.bfloat16):
            x = x if self.embed is None else self.embed(x).bfloat16()
            for block in self.blocks:
                x = block(x, self.turn)
            return x if self.head is None else self.head(x)


def mean_loss(logits_BTV: torch.Tensor, labels_BT: torch.Tensor) -> torch.Tensor:
    """Mean cross entropy of a microbatch, in float32."""
    return functional.cross_entropy(logits_BTV.float().flatten(0, 1), labels_BT.flatten())


def make_stage(o: argparse.Namespace, index: int, total: int, device: torch.device) -> PipelineStage:
    """Stage `index` of `total`, with its share of the layers, the larger shares first."""
    size, extra = divmod(o.layers, total)
    first, last = index == 0, index == total - 1
    chunk = Chunk(o, size + (index < extra), first, last).to(device)
    if not o.eager:
        chunk.compile()
    tokens = torch.empty(o.microbatch, o.sequence, dtype=torch.long, device="meta")
    stream, logits = (torch.empty(*tokens.shape, n, dtype=torch.bfloat16, device="meta") for n in (o.dim, o.vocab))
    given, handed = tokens if first else stream, logits if last else stream
    # A gradient comes back for what floats.
    given.requires_grad_(not first)
    return PipelineStage(chunk, index, total, device, input_args=given, output_args=handed.requires_grad_())


def options() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    for name in SIZES:
        parser.add_argument(f"--{name}", type=int, required=True)
    parser.add_argument("--schedule", choices=SCHEDULES, default="1f1b")
    parser.add_argument("--chunks", type=int, default=2, help="chunks a stage, of the interleaved schedule")
    parser.add_argument("--warm-up", type=int, default=2, help="steps before those that are timed")
    parser.add_argument("--steps", type=int, default=5, help="steps that are timed")
    parser.add_argument("--eager", action="store_true", help="without torch.compile")
    return parser.parse_args()


def main() -> None:
    """Train on random tokens and print what it took."""
    o, gpus = options(), torch.cuda.is_available()
    rank, ranks, local = (int(os.environ[name]) for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK"))
    device = torch.device("cuda", local) if gpus else torch.device("cpu")
    if gpus:
        torch.cuda.set_device(device)
        dist.init_process_group("nccl", device_id=device)
    else:
        torch.set_num_threads(1)
        dist.init_process_group("gloo")
    torch.manual_seed(rank)
    chunks = o.chunks if o.schedule == "interleaved" else 1
    stages = [make_stage(o, c * ranks + rank, chunks * ranks, device) for c in range(chunks)]
    parameters = [p for stage in stages for p in stage.submod.parameters()]
    loss = mean_loss if o.eager else torch.compile(mean_loss)
    placed = stages if o.schedule == "interleaved" else stages[0]
    schedule = SCHEDULES[o.schedule](placed, o.microbatches, loss_fn=loss)  # type: ignore[arg-type]
    optimizer = torch.optim.AdamW(parameters, lr=1e-4, betas=(0.9, 0.95), weight_decay=0.1, fused=True)
    seed = torch.Generator().manual_seed(0)  # the same text on all ranks
    text = torch.randint(o.vocab, (o.microbatches * o.microbatch, o.sequence + 1), generator=seed).to(device)
    inputs = (text[:, :-1].contiguous(),) if rank == 0 else ()
    labels = {"target": text[:, 1:].contiguous()} if rank == ranks - 1 else {}
    losses: list[torch.Tensor] = []

    def step() -> float:
        dist.barrier()
        start = time.perf_counter()
        losses.clear()
        schedule.step(*inputs, **labels, losses=losses if labels else None, return_outputs=False)
        norm = torch.nn.utils.get_total_norm([p.grad for p in parameters if p.grad is not None]).square()
        dist.all_reduce(norm)
        torch.nn.utils.clip_grads_with_norm_(parameters, 1.0, norm.sqrt())
        optimizer.step()
        optimizer.zero_grad()
        if gpus:
            torch.cuda.synchronize()
        dist.barrier()
        return time.perf_counter() - start

    for _ in range(o.warm_up):
        step()
    seconds = [step() for _ in range(o.steps)]
    told = torch.zeros(2, dtype=torch.float64, device=device)  # loss, which the last rank knows; peak bytes
    told[0] = torch.stack(losses).mean().item() if losses else 0.0
    told[1] = torch.cuda.max_memory_allocated() if gpus else 0
    dist.all_reduce(told, dist.ReduceOp.MAX)
    if rank == 0:
        tokens = o.microbatches * o.microbatch * o.sequence
        found = {"tokens_per_second": tokens / statistics.median(seconds), "step_seconds": seconds}
        print(json.dumps(found | {"loss": told[0].item(), "peak_bytes": int(told[1].item())}), flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
