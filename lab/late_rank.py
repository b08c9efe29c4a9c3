#!/usr/bin/env python3
"""A rank that is late for an all_reduce under PyTorch: what NCCL_SPARK_STALL_ABORT_S does then.

    NCCL_SPARK_STALL_WARN_S=5 NCCL_SPARK_STALL_ABORT_S=12 torchrun --nproc-per-node 2 late_rank.py SECONDS

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


if __name__ == "__main__":
    main()
