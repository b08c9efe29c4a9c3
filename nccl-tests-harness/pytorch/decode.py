#!/usr/bin/env python3
"""Latency of small collectives as decoding sees it: what one collective in a CUDA graph adds, in microseconds.

    python3 decode.py                                         # two GPUs of this machine
    python3 decode.py --master spark-1:29500 --launch "mpirun -np 2 -H spark-1,spark-2 --bind-to none"

A graph of compute and one collective is replayed in turn with the same graph without the collective. The result is the difference
of the two, for each call: the median and the 90th percentile. Before each call the GPU's L2 cache is flushed. The calls follow each
other at once, and after a pause of the GPU in which the processors may fall asleep, as between the layers and steps of a model.

--compare runs arms in turn, several rounds, and writes a table and a picture (SVG): spark (the plugin), spark-untuned (without its
tuner), ib (NCCL's own transport). nccl-spark must be installed, or NCCL_NET_PLUGIN name its library. The script and PyTorch must be
at the same path on every node.
"""

import argparse
import faulthandler
import gc
import json
import os
import shlex
import statistics
import subprocess
import sys

from common import require, say

ARMS = {
    "spark": {"NCCL_NET": "Spark"},
    "spark-untuned": {"NCCL_NET": "Spark", "NCCL_SPARK_TUNER": "off"},
    "ib": {"NCCL_NET": "IB", "NCCL_NET_PLUGIN": "none", "NCCL_TUNER_PLUGIN": "none"},
}
KIB = 1024
# Bytes of a rank's buffer: an all_reduce's whole buffer, an all_gather's own part.
SIZES = {
    "all_reduce": [size * KIB for size in (8, 16, 32, 48, 64, 80, 96, 128, 192, 256, 384, 512)],
    "all_gather": [size * KIB for size in (320, 512, 768, 1024)],
}
MODES = ("back-to-back", "paused")
RESULT = "decode-result "
# Pairs of calls that are queued at a time.
BATCH = 6


def main():
    options = parse()
    if options.arm:
        return work(options)
    rounds = [{arm: run(arm, options) for arm in options.compare} for _ in range(options.rounds)]
    merged = merge(rounds)
    print_table(merged, options.compare)
    with open(options.output, "w") as file:
        file.write(picture(merged, options.compare))
    print(f"picture: {options.output}")


def parse():
    parser = argparse.ArgumentParser(description="What one small collective adds to a CUDA graph, as decoding sees it.")
    parser.add_argument("--compare", type=arms, default=list(ARMS), metavar="ARM,...", help=f"arms (default: {','.join(ARMS)})")
    parser.add_argument("--rounds", type=positive, default=3, help="rounds of all arms (default: 3)")
    parser.add_argument("--calls", type=positive, default=100, help="calls of each size and round (default: 100)")
    parser.add_argument("--pause-ms", type=positive, default=10, help="pause of the GPU in milliseconds (default: 10)")
    parser.add_argument("--launch", default="torchrun --nproc-per-node 2 --no-python", help="command that starts the ranks")
    parser.add_argument("--master", metavar="HOST:PORT", help="where ranks that mpirun starts meet")
    parser.add_argument("--env", action="append", default=[], metavar="ARM:NAME=VALUE", help="a variable for one arm")
    parser.add_argument("--local-hosts", action="store_true", help="each rank is a host of its own to NCCL")
    parser.add_argument("--limit", type=positive, default=600, help="time limit of one arm in seconds (default: 600)")
    parser.add_argument("--output", default="decode.svg", help="file of the picture (default: decode.svg)")
    parser.add_argument("--arm", help=argparse.SUPPRESS)
    return parser.parse_args()


def arms(text):
    names = text.split(",")
    unknown = [name for name in names if name not in ARMS]
    if unknown:
        raise argparse.ArgumentTypeError(f"no arm {unknown[0]}; there are {','.join(ARMS)}")
    return names


def positive(text):
    number = int(text)
    if number < 1:
        raise argparse.ArgumentTypeError(f"{number}: a number from 1 on")
    return number


def run(arm, options):
    """Runs one arm on all ranks; returns rank 0's results."""
    variables = dict(ARMS[arm])
    for given in options.env:
        place, _, setting = given.partition(":")
        name, has_value, value = setting.partition("=")
        if place not in ARMS or not has_value:
            raise SystemExit(f"--env {given}: not ARM:NAME=VALUE")
        if place == arm:
            variables[name] = value
    if options.master:
        variables["MASTER_ADDR"], _, variables["MASTER_PORT"] = options.master.rpartition(":")
    own = [sys.executable, os.path.abspath(__file__), "--arm", arm, "--calls", str(options.calls)]
    own += ["--limit", str(options.limit), "--pause-ms", str(options.pause_ms)] + ["--local-hosts"] * options.local_hosts
    command = shlex.split(options.launch) + ["env"] + [f"{name}={value}" for name, value in variables.items()] + own
    try:
        done = subprocess.run(command, stdout=subprocess.PIPE, text=True, timeout=options.limit)
    except subprocess.TimeoutExpired:
        raise SystemExit(f"{arm}: no result after {options.limit} s: {shlex.join(command)}") from None
    found = [line for line in done.stdout.splitlines() if line.startswith(RESULT)]
    if done.returncode != 0 or len(found) != 1:
        raise SystemExit(f"{arm} ended with status {done.returncode}: {shlex.join(command)}\n{done.stdout[-2000:]}")
    print(f"# {arm} done", file=sys.stderr, flush=True)
    return {tuple(key.split()): times for key, times in json.loads(found[0][len(RESULT):]).items()}


def work(options):
    """One rank of one arm."""
    for name, of_mpi in (("RANK", "RANK"), ("WORLD_SIZE", "SIZE"), ("LOCAL_RANK", "LOCAL_RANK")):
        value = os.environ.get(name) or os.environ.get(f"OMPI_COMM_WORLD_{of_mpi}")
        if value is None:
            raise SystemExit(f"{name} is not set: start the ranks with torchrun or mpirun")
        os.environ[name] = value
    rank = int(os.environ["RANK"])
    # Shows where a rank hangs, before the parent gives up.
    faulthandler.dump_traceback_later(max(1, options.limit - 10), exit=True)
    if options.local_hosts:
        os.environ.update(NCCL_HOSTID=f"host-{rank}", SOFTVERBS_NODE=str(rank))
        os.environ.setdefault("NCCL_SOCKET_IFNAME", "lo")
    import torch
    import torch.distributed as dist

    torch.cuda.set_device(int(os.environ["LOCAL_RANK"]) % torch.cuda.device_count())
    dist.init_process_group("nccl", device_id=torch.device("cuda", torch.cuda.current_device()))
    say(rank, RESULT + json.dumps(measure(torch, dist, options)))
    # NCCL waits in the next call until all graphs with its kernels are gone.
    gc.collect()
    dist.barrier()
    dist.destroy_process_group()


def measure(torch, dist, options):
    """Returns the differences of each collective, size and mode."""
    results = {}
    for operation, sizes in SIZES.items():
        for size in sizes:
            graphs = [capture(torch, dist, operation, size, collective) for collective in (True, False)]
            for mode in MODES:
                pause_ms = options.pause_ms if mode == "paused" else 0
                results[f"{operation} {size} {mode}"] = differences(torch, graphs, pause_ms, options.calls)
    return results


def capture(torch, dist, operation, size, has_collective):
    """Captures compute, the collective if wanted, and compute again; checks the collective's result."""
    ranks, count = dist.get_world_size(), size // 2
    matrix = torch.randn(1024, 1024, device="cuda", dtype=torch.bfloat16)
    own = torch.ones(count, device="cuda", dtype=torch.bfloat16)
    buffer = torch.empty(count, device="cuda", dtype=torch.bfloat16)
    gathered = torch.empty(count * ranks, device="cuda", dtype=torch.bfloat16)

    def step():
        product = matrix @ matrix
        buffer.copy_(own)
        if has_collective and operation == "all_reduce":
            dist.all_reduce(buffer)
        elif has_collective:
            dist.all_gather_into_tensor(gathered, buffer)
        return product @ matrix

    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(3):
            step()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        kept = step()
    gathered.zero_()
    graph.replay()
    torch.cuda.synchronize()
    if has_collective:
        is_right = (buffer == ranks) if operation == "all_reduce" else (gathered == 1)
        require(bool(is_right.all()), f"{operation} of {size} bytes in a CUDA graph")
    return graph, (matrix, own, buffer, gathered, kept)


def differences(torch, graphs, pause_ms, calls):
    """Returns how much longer the first graph takes than the second, in microseconds, for each pair of calls."""
    cache = torch.empty(128 << 20, device="cuda", dtype=torch.uint8)
    cycles = int(pause_ms * 1e-3 * sleep_rate(torch)) if pause_ms else 0
    found = []
    while len(found) < calls:
        events = []
        for _ in range(BATCH):
            for graph, _ in graphs:
                cache.zero_()
                if cycles:
                    torch.cuda._sleep(cycles)
                begun, ended = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
                begun.record()
                graph.replay()
                ended.record()
                events.append((begun, ended))
        torch.cuda.synchronize()
        times = [begun.elapsed_time(ended) * 1e3 for begun, ended in events]
        # The ranks start the first pair of a batch at different times.
        found += [longer - shorter for longer, shorter in zip(times[::2], times[1::2])][1:]
    return found[:calls]


def sleep_rate(torch):
    """Returns the cycles of torch.cuda._sleep in a second."""
    begun, ended = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    torch.cuda._sleep(1_000_000)
    begun.record()
    torch.cuda._sleep(10_000_000)
    ended.record()
    torch.cuda.synchronize()
    return 10_000_000 / (begun.elapsed_time(ended) * 1e-3)


def merge(rounds):
    """Returns for each arm and key the median of the rounds' medians, and of their 90th percentiles."""
    merged = {}
    for arm in rounds[0]:
        for key in rounds[0][arm]:
            each = [sorted(results[arm][key]) for results in rounds]
            median = statistics.median(statistics.median(times) for times in each)
            merged[arm, key] = (median, statistics.median(times[len(times) * 9 // 10] for times in each))
    return merged


def print_table(merged, compared):
    """Prints a line for each collective, size and mode: median / 90th percentile of each arm, then the ratios of the medians."""
    ratios = [f"{compared[0]}/{arm}" for arm in compared[1:]]
    print(f"{'us: median / p90':34}" + "".join(f"{arm:>18}" for arm in compared) + "".join(f"{ratio:>22}" for ratio in ratios))
    for operation, sizes in SIZES.items():
        for size in sizes:
            for mode in MODES:
                found = [merged[arm, (operation, str(size), mode)] for arm in compared]
                cells = "".join(f"{median:9.1f} /{p90:7.1f}" for median, p90 in found)
                quotients = "".join(f"{found[0][0] / other[0]:22.2f}" for other in found[1:])
                print(f"{operation:10} {size // KIB:5} KiB {mode:13}{cells}{quotients}")


def picture(merged, compared):
    """Draws a panel for each collective and mode: size against median, with the band up to the 90th percentile."""
    colors = ["#1b7837", "#762a83", "#d95f02"]
    width, height, panels = 460, 300, []
    for row, operation in enumerate(SIZES):
        for column, mode in enumerate(MODES):
            keys = [(operation, str(size), mode) for size in SIZES[operation]]
            most = max(merged[arm, key][1] for arm in compared for key in keys) * 1.05
            x = lambda at: 60 + at * (width - 90) / max(1, len(keys) - 1)
            y = lambda us: height - 40 - max(0.0, us) / most * (height - 80)
            parts = [f'<text x="{width // 2}" y="20" text-anchor="middle">{operation}, {mode}</text>']
            for tick in range(5):
                us = most * tick / 4
                parts.append(f'<line x1="60" x2="{width - 30}" y1="{y(us):.1f}" y2="{y(us):.1f}" stroke="#ddd"/>')
                parts.append(f'<text x="54" y="{y(us) + 4:.1f}" text-anchor="end">{us:.0f} us</text>')
            for at, key in enumerate(keys):
                parts.append(f'<text x="{x(at):.1f}" y="{height - 22}" text-anchor="middle">{int(key[1]) // KIB}</text>')
            parts.append(f'<text x="{width // 2}" y="{height - 6}" text-anchor="middle">KiB of a rank</text>')
            for arm, color in zip(compared, colors):
                line = " ".join(f"{x(at):.1f},{y(merged[arm, key][0]):.1f}" for at, key in enumerate(keys))
                upper = [f"{x(at):.1f},{y(merged[arm, key][1]):.1f}" for at, key in enumerate(keys)]
                parts.append(f'<polygon points="{line} {" ".join(reversed(upper))}" fill="{color}" opacity="0.15"/>')
                parts.append(f'<polyline points="{line}" fill="none" stroke="{color}" stroke-width="2"/>')
            panels.append(f'<g transform="translate({column * width},{row * height + 30})">{"".join(parts)}</g>')
    legend = "".join(f'<text x="{60 + 140 * at}" y="20" fill="{color}">{arm}</text>' for at, (arm, color) in enumerate(zip(compared, colors)))
    size = f'width="{2 * width}" height="{2 * height + 40}"'
    style = 'font-family="sans-serif" font-size="12"'
    return f'<svg xmlns="http://www.w3.org/2000/svg" {size} {style}><rect {size} fill="white"/>{legend}{"".join(panels)}</svg>\n'


if __name__ == "__main__":
    main()
