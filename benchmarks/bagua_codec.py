"""Cost of Bagua's compression: ms per bucket of 10 MiB, and the transfer time that it saves.

Measures ``compress`` and ``decompress`` of float32 on the CPU, with one thread and with two. The
minimum of many rounds counts, because other work on the machine only adds time. ``backward`` runs
them in a thread while the main thread computes a backward, as a strategy does. ``--compile`` adds
torch.compile of the plain lines, and its compile time without a cache. ``--cuda`` measures on a
GPU instead.

    python benchmarks/bagua_codec.py [--mib 10] [--chunks 2] [--rounds 50] [--gbit 1]
                                     [--compile] [--cuda]
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import sys
import tempfile
import threading
import time
from collections.abc import Callable

import torch
from torch import nn

from geartrain_bagua import minmax_uint8
from geartrain_bagua.minmax_uint8 import compress, decode_plain, decompress, encode_plain


def least(work: Callable[[], object], rounds: int) -> dict[str, float]:
    """Return the minimum wall time and CPU time of a round, in ms."""
    work()
    wall, cpu = [], []
    for _ in range(rounds):
        start = time.perf_counter(), time.process_time()
        work()
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        wall.append(time.perf_counter() - start[0])
        cpu.append(time.process_time() - start[1])
    return {"wall_ms": round(min(wall) * 1e3, 2), "cpu_ms": round(min(cpu) * 1e3, 2)}


def fast(chunks: torch.Tensor, rounds: int) -> dict[str, object]:
    wire, out = compress(chunks), torch.empty_like(chunks)
    return {
        "compress": least(lambda: compress(chunks), rounds),
        "decompress": least(lambda: decompress(wire, out), rounds),
        "both": least(lambda: decompress(compress(chunks), out), rounds),
    }


def plain(chunks: torch.Tensor, rounds: int) -> dict[str, float]:
    return least(lambda: decode_plain(*encode_plain(chunks)), rounds)


def compiled(chunks: torch.Tensor, rounds: int) -> dict[str, float]:
    with tempfile.TemporaryDirectory() as cache:
        os.environ["TORCHINDUCTOR_CACHE_DIR"] = cache
        torch.compiler.reset()
        start = time.perf_counter()
        encoding, decoding = (
            torch.compile(encode_plain, dynamic=True),
            torch.compile(decode_plain, dynamic=True),
        )
        codes, bounds = encoding(chunks)
        decoding(codes, bounds)
        seconds = time.perf_counter() - start
        assert torch.equal(codes, minmax_uint8.encode(chunks)[0])
        return {
            **least(lambda: decoding(*encoding(chunks)), rounds),
            "compile_s": round(seconds, 1),
        }


def beside_a_backward(chunks: torch.Tensor, rounds: int) -> dict[str, float]:
    """Return the minimum, in ms, of both in a second thread while this one computes backwards."""
    net = nn.Sequential(*[nn.Linear(512, 512) for _ in range(8)])
    loss = net(torch.randn(256, 512)).square().mean()
    measured: list[dict[str, float]] = []
    out = torch.empty_like(chunks)
    thread = threading.Thread(
        target=lambda: measured.append(least(lambda: decompress(compress(chunks), out), rounds))
    )
    thread.start()
    while thread.is_alive():
        loss.backward(retain_graph=True)
    return {"wall_ms": measured[0]["wall_ms"]}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--mib", type=float, default=10, help="a bucket, in MiB of float32")
    parser.add_argument("--chunks", type=int, default=2, help="chunks of a bucket: the ranks")
    parser.add_argument("--rounds", type=int, default=50)
    parser.add_argument("--gbit", type=float, default=1, help="the network, in Gbit/s")
    parser.add_argument("--compile", action="store_true")
    parser.add_argument("--cuda", action="store_true")
    options = parser.parse_args()
    columns = int(options.mib * 2**18 / options.chunks)
    chunks = torch.randn(options.chunks, columns, device="cuda" if options.cuda else "cpu")
    saved = chunks.numel() * 4 - compress(chunks).numel()
    facts: dict[str, object] = {
        "saved_bytes": saved,
        "saved_ms_on_the_wire": round(saved * 8 / options.gbit / 1e6, 2),
    }
    for threads in [1] if options.cuda else [1, 2]:
        torch.set_num_threads(threads)
        row = {"fast": fast(chunks, options.rounds), "plain": plain(chunks, options.rounds)}
        if not options.cuda:
            row["beside_a_backward"] = beside_a_backward(chunks, options.rounds)
        if options.compile:
            row["compiled"] = compiled(chunks, options.rounds)
        facts[f"{threads} threads"] = row
    facts |= {**vars(options), "torch": torch.__version__, "python": platform.python_version()}
    json.dump(facts, sys.stdout, indent=2)
    print()


if __name__ == "__main__":
    main()
