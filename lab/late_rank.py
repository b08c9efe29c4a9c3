#!/usr/bin/env python3
"""A rank that is late for an all_reduce under PyTorch: what NCCL_SPARK_STALL_ABORT_S does then. Or a rank that skips an all_gather:
what both ranks log.

    NCCL_SPARK_STALL_WARN_S=5 NCCL_SPARK_STALL_ABORT_S=12 torchrun --nproc-per-node 2 late_rank.py SECONDS
    NCCL_SPARK_STALL_WARN_S=10 NCCL_DEBUG=WARN torchrun --nproc-per-node 2 late_rank.py SECONDS skip

The other variables are those of docs/guide/commands.md, section "The software fabric". Both ranks use the first GPU,
and each rank is a host of its own. Rank 1 sleeps so long before the second all_reduce.
Each rank prints the result of the second all_reduce, or PyTorch's error, and the time since the first all_reduce. With
TORCH_NCCL_BLOCKING_WAIT=1, PyTorch raises the error in the program; otherwise its watchdog ends the process.
"""

import datetime
import os
import sys
import time


def main():
    rank, late_s = int(os.environ["RANK"]), float(sys.argv[1])
    os.environ.update(NCCL_HOSTID=f"host-{rank}", SOFTVERBS_NODE=str(rank))
    import torch
    import torch.distributed as dist

    torch.cuda.set_device(0)
    dist.init_process_group("nccl", timeout=datetime.timedelta(seconds=300), device_id=torch.device("cuda", 0))
    data = torch.ones(1 << 20, device="cuda")
    dist.all_reduce(data)
    torch.cuda.synchronize()
    if sys.argv[2:] == ["skip"]:
        return skip(torch, dist, rank, late_s)
    begun = time.monotonic()
    if rank == 1:
        time.sleep(late_s)
    try:
        dist.all_reduce(data, async_op=True).wait()
        torch.cuda.synchronize()
    except dist.DistBackendError as error:
        print(f"rank {rank}: after {time.monotonic() - begun:.1f} s: {error}", flush=True)
        os._exit(3)  # Without this, PyTorch would wait for the GPU at exit.
    print(f"rank {rank}: after {time.monotonic() - begun:.1f} s: right is {bool((data == 4).all())}", flush=True)
    dist.destroy_process_group()


def skip(torch, dist, rank, wait_s):
    """Both ranks gather 20 times and reduce once. Rank 0 skips the last all_gather and waits, as a program with a fault does."""
    own = torch.ones(1 << 16, device="cuda")
    gathered = torch.empty(2 << 16, device="cuda")
    for _ in range(20):
        dist.all_gather_into_tensor(gathered, own)
    dist.all_reduce(own)
    torch.cuda.synchronize()
    if rank == 1:
        dist.all_gather_into_tensor(gathered, own)
    time.sleep(wait_s)
    print(f"rank {rank}: waited for {wait_s} s", flush=True)
    # The all_gather would never end.
    os._exit(0)


if __name__ == "__main__":
    main()
