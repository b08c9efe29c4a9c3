#!/usr/bin/env python3
"""Keeps the code of one GPU architecture in an NCCL library: the payloads of all other fat binary entries become zeros.

    tests/long/slim-nccl.py nvidia/nccl/lib/libnccl.so.2 libnccl.so.2 90

The file's layout does not change, so it loads as before, and it compresses well: the library of the wheel
nvidia-nccl-cu13 2.32.3 (344 MB) becomes 46 MB with xz -2. That is for a GPU machine that has no way to a registry.

A container begins with the u32 0xBA55ED50, u16 version, u16 header size, and the u64 size of its entries. An entry has its
header's size as u32 at 4, its payload's size as u64 at 8, and its architecture as u32 at 28 (read from NVIDIA's files).
"""

import struct
import sys
from pathlib import Path

MAGIC = struct.pack("<I", 0xBA55ED50)
HEADER_BYTES = 16


def containers(data):
    """Yields the begin and the end of the entries of each container."""
    at = 0
    while (at := data.find(MAGIC, at)) >= 0:
        header, size = struct.unpack_from("<HQ", data, at + 6)
        begin, end = at + header, at + header + size
        if header == HEADER_BYTES and end <= len(data):
            yield begin, end
            at = end
        else:
            at += len(MAGIC)


def clear(data, keep):
    """Clears the payloads of other architectures than `keep`. Returns the numbers of kept and cleared bytes."""
    kept = cleared = 0
    for entry, end in containers(data):
        while entry < end:
            header, payload = struct.unpack_from("<IQ", data, entry + 4)
            (architecture,) = struct.unpack_from("<I", data, entry + 28)
            if header < 32 or entry + header + payload > end:
                sys.exit(f"the entry at byte {entry} is not as expected: header {header}, payload {payload}")
            if architecture == keep:
                kept += payload
            else:
                data[entry + header : entry + header + payload] = bytes(payload)
                cleared += payload
            entry += header + payload
    return kept, cleared


def main():
    if len(sys.argv) != 4 or not sys.argv[3].isdigit():
        sys.exit("usage: slim-nccl.py LIBRARY OUTPUT ARCHITECTURE, as in libnccl.so.2 slim/libnccl.so.2 90")
    source, target, keep = Path(sys.argv[1]), Path(sys.argv[2]), int(sys.argv[3])
    data = bytearray(source.read_bytes())
    kept, cleared = clear(data, keep)
    if not kept:
        sys.exit(f"{source} has no code for sm_{keep}")
    target.write_bytes(data)
    print(f"{target}: {kept >> 20} MiB for sm_{keep}, {cleared >> 20} MiB cleared")


if __name__ == "__main__":
    main()
