#!/usr/bin/env python3
"""PyTorch over the plugin: right answers in what PyTorch and vLLM do with NCCL, and which network NCCL used.

    nccl-spark must be installed, or its library named:
    NCCL_NET_PLUGIN=/path/libnccl_net_spark.so NCCL_NET=Spark torchrun --nproc-per-node 2 check.py

Two or more processes, a GPU for each. On one machine --local-hosts makes each rank a host of its own to NCCL (else it would use
NVLink or shared memory) and a node of the software fabric, if SOFTVERBS_FABRIC names one.

Ends with status 0 only if every value was right and every channel went over NET/Spark (--network names another one).
"""

import argparse
import os

from common import add_network_options, check_network, replay_times, require, require_torchrun, say, start_log


def main():
    options = parse()
    rank = int(os.environ["RANK"])
    log = start_log(rank, options.local_hosts)
    import torch
    import torch.distributed as dist

    torch.cuda.set_device(int(os.environ["LOCAL_RANK"]) % torch.cuda.device_count())
    dist.init_process_group("nccl", device_id=torch.device("cuda", torch.cuda.current_device()))
    say(rank, f"PyTorch {torch.__version__}, NCCL {'.'.join(map(str, torch.cuda.nccl.version()))}, {dist.get_world_size()} ranks")
    collectives(torch, dist, options)
    training(torch, dist, options)
    latency(torch, dist, options)
    dist.barrier()
    dist.destroy_process_group()
    check_network(rank, log, options.network)


def parse():
    parser = argparse.ArgumentParser(description="PyTorch over the plugin: right answers, and which network NCCL used.")
    add_network_options(parser)
    parser.add_argument("--steps", type=int, default=20, help="training steps (default: 20)")
    parser.add_argument("--tolerance", type=float, default=1e-5,
                        help="how far a loss may be from the other backend's, as a part of it (default: 1e-5)")
    parser.add_argument("--repeats", type=int, default=200, help="all-reduces of each size that are timed (default: 200)")
    options = parser.parse_args()
    require_torchrun(parser)
    return options


def collectives(torch, dist, options):
    """all_reduce, all_gather, send and recv from 8 bytes to 64 MiB, every value checked."""
    rank, ranks = dist.get_rank(), dist.get_world_size()
    sizes = [8, 512, 4096, 65536, 1 << 20, 16 << 20, 64 << 20]
    for size in sizes:
        count = size // 4
        # Small whole numbers: sums of floats are exact, so equality is what is asked for.
        mine = lambda of: (torch.arange(count, device="cuda", dtype=torch.float32) % 1000) + of
        summed = mine(rank)
        dist.all_reduce(summed)
        expected = ranks * (torch.arange(count, device="cuda", dtype=torch.float32) % 1000) + sum(range(ranks))
        require(torch.equal(summed, expected), f"all_reduce of {size} bytes")
        parts = [torch.empty(count, device="cuda") for _ in range(ranks)]
        dist.all_gather(parts, mine(rank))
        for other, part in enumerate(parts):
            require(torch.equal(part, mine(other)), f"all_gather of {size} bytes, the part of rank {other}")
        came = torch.empty(count, device="cuda")
        sends = dist.P2POp(dist.isend, mine(rank), (rank + 1) % ranks)
        receives = dist.P2POp(dist.irecv, came, (rank - 1) % ranks)
        for work in dist.batch_isend_irecv([sends, receives]):
            work.wait()
        require(torch.equal(came, mine((rank - 1) % ranks)), f"send and recv of {size} bytes")
    torch.cuda.synchronize()
    say(rank, f"collectives: all_reduce, all_gather, send/recv right at {len(sizes)} sizes from {sizes[0]} B to {sizes[-1] >> 20} MiB")


def training(torch, dist, options):
    """Steps of a small model under DDP: the losses are those of the same steps over gloo."""
    over = {"nccl": losses(torch, dist, options, None)}
    over["gloo"] = losses(torch, dist, options, dist.new_group(backend="gloo"))
    worst = max(abs(a - b) / abs(b) for a, b in zip(over["nccl"], over["gloo"]))
    require(worst <= options.tolerance, f"a loss differs from gloo's by {worst:.2e} of it: {over}")
    first, last = over["nccl"][0], over["nccl"][-1]
    require(last < first, f"{options.steps} steps did not lower the loss: {first} to {last}")
    say(dist.get_rank(), f"training: {options.steps} DDP steps, loss {first:.6f} to {last:.6f}; at most {worst:.1e} of it from gloo's")


def losses(torch, dist, options, group):
    torch.manual_seed(7)
    layers = [torch.nn.Linear(256, 1024), torch.nn.ReLU(), torch.nn.Linear(1024, 1024), torch.nn.ReLU(), torch.nn.Linear(1024, 16)]
    model = torch.nn.parallel.DistributedDataParallel(torch.nn.Sequential(*layers).cuda(), process_group=group)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    data = torch.Generator().manual_seed(100 + dist.get_rank())
    inputs = torch.randn(64, 256, generator=data).cuda()
    targets = torch.randn(64, 16, generator=data).cuda()
    found = []
    for _ in range(options.steps):
        optimizer.zero_grad()
        loss = torch.nn.functional.mse_loss(model(inputs), targets)
        loss.backward()
        optimizer.step()
        found.append(loss.item())
    return found


def latency(torch, dist, options):
    """What vLLM does between the layers of a tensor-parallel model: an all-reduce of 8 to 64 KB, replayed from a CUDA graph."""
    rank = dist.get_rank()
    for size in (8192, 16384, 32768, 65536):
        tensor = torch.ones(size // 2, device="cuda", dtype=torch.bfloat16)
        # Ranks times itself would soon be infinite.
        scale = 1.0 / dist.get_world_size()
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            for _ in range(3):
                dist.all_reduce(tensor)
                tensor.mul_(scale)
        torch.cuda.current_stream().wait_stream(stream)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            for _ in range(10):
                dist.all_reduce(tensor)
                tensor.mul_(scale)
        median, best = replay_times(graph.replay, torch.cuda.synchronize, max(1, options.repeats // 10), 10)
        require(bool((tensor == 1).all()), f"all_reduce of {size} bytes in a CUDA graph")
        say(rank, f"latency: all_reduce of {size >> 10} KB in a CUDA graph: {median:.1f} us in the middle, {best:.1f} at best")


if __name__ == "__main__":
    main()
