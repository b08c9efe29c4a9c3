#!/usr/bin/env python3
"""vLLM's own NCCL communicator over the plugin: eager and in CUDA graphs, every value checked, and all-reduces timed.

    NCCL_NET_PLUGIN=/path/libnccl_net_spark.so NCCL_NET=Spark torchrun --nproc-per-node 2 pynccl.py

Two or more processes, a GPU for each; --local-hosts as in check.py. vLLM's PyNcclCommunicator is built over a gloo group, as vLLM
builds it, with the libnccl that vLLM finds: VLLM_NCCL_SO_PATH, or PyTorch's. Where vLLM is not installed, --vllm names a folder
in which its wheel was unzipped. The wheel's *.py files and its .dist-info folder are enough.

The plugin reads NCCL_SPARK_TUNER=on|off; this script prints it, and the tuner that NCCL says it uses.

Ends with status 0 only if every value was right and every channel went over NET/Spark (--network names another one).
"""

from __future__ import annotations

import argparse
import ctypes
import importlib.abc
import importlib.machinery
import os
import sys
import time
import types
from collections.abc import Callable
from typing import TYPE_CHECKING, NamedTuple

import torch
import torch.distributed as dist

from common import add_network_options, check_network, log_lines, replay_times, require, require_torchrun, say, start_log

if TYPE_CHECKING:
    from vllm.distributed.device_communicators.pynccl import PyNcclCommunicator

CHECKED_BYTES = [8192 << step for step in range(12)]  # 8 KB to 16 MB
TIMED_BYTES = CHECKED_BYTES[:10]  # 8 KB to 4 MB
TIMED_IN_A_GRAPH = 10
# bfloat16 holds every whole number up to this one.
EXACT = 256
# No rank gives it, and no sum is negative: what an output holds before a collective writes it.
BLANK = -1


def main() -> None:
    options = parse()
    rank = int(os.environ["RANK"])
    log = start_log(rank, options.local_hosts)
    device = choose_device()
    dist.init_process_group("gloo")
    communicator = make_communicator(options.vllm, device)
    with torch.cuda.stream(torch.cuda.Stream()):
        check_operations(communicator, options.replays)
        time_all_reduce(communicator, options.timed)
    torch.cuda.synchronize()
    dist.barrier()
    begun = time.monotonic()
    communicator.destroy()
    say(rank, f"destroyed in {time.monotonic() - begun:.1f} s")
    dist.destroy_process_group()
    report_tuner(rank, log)
    check_network(rank, log, options.network)


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="vLLM's NCCL communicator over the plugin: right answers and times.")
    add_network_options(parser)
    parser.add_argument("--vllm", metavar="DIR", help="a folder with vLLM's unzipped wheel (default: the installed vLLM)")
    parser.add_argument("--replays", type=int, default=4, help="checked replays of each CUDA graph (default: 4)")
    parser.add_argument("--timed", type=int, default=100, help="timed replays of each CUDA graph (default: 100)")
    options = parser.parse_args()
    require_torchrun(parser)
    if options.replays < 1 or options.timed < 1:
        parser.error("--replays and --timed must be at least 1")
    if not 2 <= int(os.environ["WORLD_SIZE"]) <= EXACT // 2:
        parser.error(f"this needs 2 to {EXACT // 2} processes, not {os.environ['WORLD_SIZE']}")
    if options.vllm and not os.path.isfile(os.path.join(options.vllm, "vllm", "__init__.py")):
        parser.error(f"{options.vllm} has no folder vllm with an __init__.py: unzip vLLM's wheel there")
    return options


def choose_device() -> torch.device:
    require(torch.cuda.device_count() > 0, "PyTorch finds no GPU")
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"]) % torch.cuda.device_count())
    torch.cuda.set_device(device)
    return device


def make_communicator(folder: str | None, device: torch.device) -> PyNcclCommunicator:
    if folder:
        sys.path.insert(0, os.path.abspath(folder))
    empty = EmptyKernels()
    # At the end, so that the kernels of a complete vLLM are found first.
    sys.meta_path.append(empty)
    import vllm
    from vllm.distributed.device_communicators.pynccl import PyNcclCommunicator
    from vllm.platforms import current_platform

    require(current_platform.is_cuda(), "vLLM does not find CUDA: it needs NVML, and its .dist-info folder beside the folder vllm")
    communicator = PyNcclCommunicator(group=dist.group.WORLD, device=device)
    require(not communicator.disabled, "vLLM disabled its communicator: it could not load NCCL, or VLLM_DISABLE_PYNCCL is set")
    rank = communicator.rank
    say(rank, f"vLLM {vllm.__version__} from {os.path.dirname(vllm.__file__)}, PyTorch {torch.__version__}, {communicator.world_size} ranks")
    if empty.names:
        say(rank, f"vLLM's compiled {', '.join(empty.names)} not found: an empty module in place of each (the communicator uses none)")
    version = communicator.nccl.ncclGetVersion()
    chosen = os.environ.get("VLLM_NCCL_SO_PATH") or "not set"
    say(rank, f"NCCL {version} from {library_path(communicator)}; VLLM_NCCL_SO_PATH {chosen}")
    return communicator


class EmptyKernels(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Finds an empty module for each of vLLM's compiled kernels that nothing else finds.

    vLLM's CUDA platform imports them when it is loaded; the communicator uses none.
    """

    def __init__(self) -> None:
        self.names: list[str] = []

    def find_spec(self, fullname: str, path: object, target: object = None) -> importlib.machinery.ModuleSpec | None:
        if not fullname.startswith("vllm._C"):
            return None
        self.names.append(fullname)
        return importlib.machinery.ModuleSpec(fullname, self)

    def exec_module(self, module: types.ModuleType) -> None:
        pass


def library_path(communicator: PyNcclCommunicator) -> str:
    """The file of the libnccl whose functions vLLM calls."""
    address = ctypes.cast(communicator.nccl.lib.ncclAllReduce, ctypes.c_void_p).value or 0
    with open("/proc/self/maps") as mappings:
        for line in mappings:
            fields = line.split(maxsplit=5)
            begin, end = (int(bound, 16) for bound in fields[0].split("-"))
            if begin <= address < end and len(fields) == 6:
                return fields[5].strip()
    return "a file that /proc/self/maps does not name"


# Maps a rank to the tensor that it gives.
Given = Callable[[int], torch.Tensor]


class Operation(NamedTuple):
    """One of the communicator's operations: `call` takes what this rank gives, and where the result goes."""

    name: str
    call: Callable[[torch.Tensor, torch.Tensor], object]
    expected: Callable[[Given], torch.Tensor]


def operations(communicator: PyNcclCommunicator, count: int) -> list[Operation]:
    """All operations on tensors of `count` elements."""
    rank, ranks = communicator.rank, communicator.world_size
    before, after, root = (rank - 1) % ranks, (rank + 1) % ranks, ranks - 1
    part = count // ranks
    # Uneven parts: the first rank's is half as long as the others', the last rank's takes the rest.
    uneven = [part // 2] + [part] * (ranks - 2)
    uneven.append(count - sum(uneven))
    even_slice = slice(rank * part, (rank + 1) * part)
    uneven_slice = slice(sum(uneven[:rank]), sum(uneven[: rank + 1]))

    def broadcast(given: torch.Tensor, result: torch.Tensor) -> None:
        if rank == root:
            result.copy_(given)
        communicator.broadcast(result, root)

    def send_and_receive(given: torch.Tensor, result: torch.Tensor) -> None:
        communicator.group_start()
        communicator.send(given, after)
        communicator.recv(result, before)
        communicator.group_end()

    def joined(given_by: Given, sizes: list[int]) -> torch.Tensor:
        return torch.cat([given_by(other)[:size] for other, size in enumerate(sizes)])

    return [
        Operation("all_reduce", lambda given, result: communicator.all_reduce(given, result), lambda given_by: total(given_by, ranks)),
        Operation("all_gather", lambda given, result: communicator.all_gather(result, given[:part]),
                  lambda given_by: joined(given_by, [part] * ranks)),
        Operation("all_gatherv", lambda given, result: communicator.all_gatherv(result, given[: uneven[rank]], uneven),
                  lambda given_by: joined(given_by, uneven)),
        Operation("reduce_scatter", lambda given, result: communicator.reduce_scatter(result, given),
                  lambda given_by: total(given_by, ranks)[even_slice]),
        Operation("reduce_scatterv", lambda given, result: communicator.reduce_scatterv(result, given, uneven),
                  lambda given_by: total(given_by, ranks)[uneven_slice]),
        Operation("broadcast", broadcast, lambda given_by: given_by(root)),
        Operation("send and recv", send_and_receive, lambda given_by: given_by(before)),
    ]


def check_operations(communicator: PyNcclCommunicator, replays: int) -> None:
    """Every operation at every size and type: eager, then captured in one CUDA graph and replayed with other inputs each time."""
    names: list[str] = []
    for dtype in (torch.bfloat16, torch.float32):
        for size in CHECKED_BYTES:
            count = size // dtype.itemsize
            count -= count % communicator.world_size
            table = operations(communicator, count)
            check_table(communicator, table, count, dtype, replays)
            names = [operation.name for operation in table]
    first, last = CHECKED_BYTES[0] >> 10, CHECKED_BYTES[-1] >> 20
    say(communicator.rank, f"all values right: {', '.join(names)}; bfloat16 and float32, {len(CHECKED_BYTES)} sizes from {first} KB to {last} MB; "
        f"eager, and {replays} replays of CUDA graphs with other inputs each time")


def check_table(communicator: PyNcclCommunicator, table: list[Operation], count: int, dtype: torch.dtype, replays: int) -> None:
    given = torch.empty(count, device=communicator.device, dtype=dtype)
    results = [torch.empty_like(operation.expected(given_in(communicator, 0, count, dtype))) for operation in table]

    def run() -> None:
        for operation, result in zip(table, results):
            operation.call(given, result)

    def check_turn(turn: int, start: Callable[[], None], how: str) -> None:
        given_by = given_in(communicator, turn, count, dtype)
        given.copy_(given_by(communicator.rank))
        for result in results:
            result.fill_(BLANK)
        start()
        for operation, result in zip(table, results):
            check(result, operation.expected(given_by), f"{operation.name} of {count * dtype.itemsize} bytes of {dtype}, {how}")

    check_turn(0, run, "eager")
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=torch.cuda.current_stream()):
        run()
    for turn in range(1, replays + 1):
        check_turn(turn, graph.replay, f"replay {turn} of a CUDA graph")


def total(given_by: Given, ranks: int) -> torch.Tensor:
    return torch.stack([given_by(rank) for rank in range(ranks)]).sum(dim=0)


def given_in(communicator: PyNcclCommunicator, turn: int, count: int, dtype: torch.dtype) -> Given:
    return lambda rank: values(communicator, rank, turn, count, dtype)


def values(communicator: PyNcclCommunicator, rank: int, turn: int, count: int, dtype: torch.dtype) -> torch.Tensor:
    """What a rank gives in a turn: whole numbers so small that their sum over all ranks is exact in bfloat16."""
    index = torch.arange(count, device=communicator.device)
    # The second term moves the period of the first on, so that data at a wrong offset is seen.
    return ((index + index // 251 + 37 * rank + 11 * turn) % (EXACT // communicator.world_size)).to(dtype)


def check(result: torch.Tensor, expected: torch.Tensor, what: str) -> None:
    if torch.equal(result, expected):
        return
    wrong = torch.nonzero(result != expected).flatten()
    first = int(wrong[0])
    require(False, f"{what}: {len(wrong)} of {len(result)} values, the first at {first}: {result[first]:g} in place of {expected[first]:g}")


def time_all_reduce(communicator: PyNcclCommunicator, replays: int) -> None:
    """All-reduces of bfloat16 in a CUDA graph, as vLLM has them between a model's layers; rank 0's clock."""
    rank, ranks, dtype = communicator.rank, communicator.world_size, torch.bfloat16
    say(rank, f"all_reduce in a CUDA graph of {TIMED_IN_A_GRAPH}, NCCL_SPARK_TUNER {tuner_setting()}, us each, {replays} replays:")
    for size in TIMED_BYTES:
        count = size // dtype.itemsize
        given = [values(communicator, rank, turn, count, dtype) for turn in range(TIMED_IN_A_GRAPH)]
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=torch.cuda.current_stream()):
            results = [communicator.all_reduce(tensor) for tensor in given]
        for _ in range(5):
            graph.replay()
        median, best = replay_times(graph.replay, torch.cuda.synchronize, replays, TIMED_IN_A_GRAPH)
        for turn, (tensor, result) in enumerate(zip(given, results), TIMED_IN_A_GRAPH):
            tensor.copy_(values(communicator, rank, turn, count, dtype))
            result.fill_(BLANK)
        graph.replay()
        for turn, result in enumerate(results, TIMED_IN_A_GRAPH):
            expected = total(given_in(communicator, turn, count, dtype), ranks)
            check(result, expected, f"all_reduce {turn - TIMED_IN_A_GRAPH} of the timed CUDA graph of {size} bytes")
        say(rank, f"  {size >> 10:5} KB: median {median:7.1f}, best {best:7.1f}")


def tuner_setting() -> str:
    return os.environ.get("NCCL_SPARK_TUNER") or "not set"


def report_tuner(rank: int, log: str) -> None:
    using = [line.split("NCCL INFO")[-1].strip() for line in log_lines(log) if "TUNER/Plugin: Using" in line]
    say(rank, f"NCCL_SPARK_TUNER {tuner_setting()}; NCCL's log: {using[0] if using else 'no line names a tuner'}")


if __name__ == "__main__":
    main()
