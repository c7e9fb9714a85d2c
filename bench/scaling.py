#!/usr/bin/env python3
"""A model of the time of a step with data parallelism: what each rank computes, and the bytes that it moves over the bandwidth
of what it shares with others. First the model is fitted on this host, at one and two ranks of ddp and ddp_sharded, and checked
against three and four: there ranks share the memory, through which gradients are summed, too. Then it says what a cluster of
GPUs would do, whose constants come from its data sheet and from the ZeRO-Offload paper (Ren et al. 2021, arXiv:2101.06840):
nothing there is measured.

  ./bazelw build //bench:ddp_step && OMP_NUM_THREADS=1 python3 bench/scaling.py bazel-bin/bench/ddp_step [rounds]
"""
import os
import statistics
import sys
from dataclasses import dataclass

from python_ddp import run

ROUNDS = 3
WIDTH, STEPS = 2576, 10  # 20 million parameters
NUM_PARAMETERS = 3 * (WIDTH * WIDTH + WIDTH) + 2 * WIDTH + 2
FITTED, CHECKED = (1, 2), (3, 4)
UPDATE_BYTES = 28  # per parameter, that Adam reads and writes


@dataclass
class Host:
    """Ranks that share cores and memory. Both constants are fitted for one strategy."""
    compute_s: float  # of a step of one rank that has a core for itself, without its waiting for memory
    bytes_per_s: float  # of memory, for all ranks together
    cores: int

    def step_s(self, strategy, ranks):
        return self.compute_s * turns(ranks, self.cores) + ranks * traffic(strategy, ranks) / self.bytes_per_s


def turns(ranks, cores):
    """By how much longer a rank computes if it has to share its core."""
    return max(1.0, ranks / cores)


def traffic(strategy, ranks):
    """Bytes that a rank reads and writes in a step, in fp32. Activations are left out: there are few."""
    forward_backward = 12  # per parameter: it is read twice, and a gradient written
    update = UPDATE_BYTES / (ranks if strategy == "ddp_sharded" else 1)
    # A rank copies what the others need to where they see it, adds what they have of its own part, and hands that out:
    # gradients that are summed with ddp, new parameters with ddp_sharded.
    others = (ranks - 1) / ranks
    sums = 4 * (3 * others + 2 / ranks) if ranks > 1 else 0
    hand_out = 4 * (2 / ranks + 2 * others) if ranks > 1 else 0
    return NUM_PARAMETERS * (forward_backward + update + sums + hand_out)


def fit(strategy, step_s, cores):
    """The host on which one rank and two ranks take these seconds."""
    # step_s[n] = compute * turns(n) + bytes(n) / bandwidth: two equations with two unknowns.
    (turns1, bytes1), (turns2, bytes2) = ((turns(n, cores), n * traffic(strategy, n)) for n in FITTED)
    s_per_byte = (step_s[2] * turns1 - step_s[1] * turns2) / (bytes2 * turns1 - bytes1 * turns2)
    return Host((step_s[1] - bytes1 * s_per_byte) / turns1, 1 / s_per_byte, cores)


def check_on_this_host(program, rounds):
    """Prints a row for each strategy and number of ranks. Returns the largest error, as a fraction."""
    cores = len(os.sched_getaffinity(0))
    strategies = ["ddp", "ddp_sharded"]
    times = {(strategy, ranks): [] for strategy in strategies for ranks in FITTED + CHECKED}
    for _ in range(rounds):
        for strategy, ranks in times:
            command = [program, f"--width={WIDTH}", f"--steps={STEPS}", f"--strategy={strategy}", f"--devices={ranks}"]
            times[strategy, ranks].append(run(command, ranks)[0] / 1e6)
    worst = 0.0
    print(f"{NUM_PARAMETERS / 1e6:.0f} M parameters, {cores} cores, one thread a rank; the time of a step in ms")
    for strategy in strategies:
        found = {ranks: statistics.median(times[strategy, ranks]) for ranks in FITTED + CHECKED}
        host = fit(strategy, found, cores)
        print(f"{strategy:<12} 1 and 2 ranks: {found[1] * 1e3:.1f}, {found[2] * 1e3:.1f}; fitted: {host.compute_s * 1e3:.1f} ms on a core, "
              f"{host.bytes_per_s / 1e9:.1f} GB/s of memory")
        for ranks in CHECKED:
            expected = host.step_s(strategy, ranks)
            worst = max(worst, abs(expected / found[ranks] - 1))
            print(f"{strategy:<12} {ranks} ranks: computed {expected * 1e3:7.1f}, measured {found[ranks] * 1e3:7.1f}, "
                  f"error {expected / found[ranks] - 1:+.1%}", flush=True)
    return worst


@dataclass
class Cluster:
    name: str
    gpus_per_node: int
    flops: float  # per GPU and second, that forward and backward reach
    memory_bytes: float  # of a GPU
    memory_bytes_per_s: float  # of a GPU
    host_bytes_per_s: float  # memory of a node's host
    pcie_bytes_per_s: float  # each way, of a GPU
    node_bytes_per_s: float  # between nodes, of a node


@dataclass
class Model:
    """A GPT that recomputes its activations: a layer's input is kept."""
    layers: int
    width: int
    tokens: int  # of a sample
    batch: int  # samples of a GPU and step, as far as memory allows

    @property
    def parameters(self):
        return 12 * self.layers * self.width**2

    @property
    def sample_bytes(self):
        return 2 * self.layers * self.width * self.tokens


DGX2 = Cluster("DGX-2 nodes: 16 V100 of 32 GB", 16, 40e12, 32e9, 900e9, 256e9, 12e9, 100e9)
GPT_10B = Model(50, 4096, 1024, 10)
WORKSPACE = 2e9  # bytes of a GPU for buckets, one recomputed layer and the allocator


def batch_of(strategy, cluster, model, ranks):
    """Samples of a GPU and step that fit; 0: the model does not fit."""
    state = {"zero_offload": 2.0, "ddp_sharded": 2 + 14 / ranks, "ddp": 16.0}[strategy]
    room = cluster.memory_bytes - WORKSPACE - state * model.parameters
    return max(0, min(model.batch, int(room / model.sample_bytes)))


def cluster_step_s(strategy, cluster, model, ranks, batch):
    """Forward, backward with a second forward, and what is not hidden behind them."""
    p = model.parameters
    backward = 6 * p * batch * model.tokens / cluster.flops
    compute = backward / 3 + backward
    if ranks > cluster.gpus_per_node:  # all GPUs of a node share its wire
        wire = 2 * p * (ranks - 1) / ranks / cluster.node_bytes_per_s
    else:
        wire = 0.0  # NVLink is fast enough to be hidden
    to_reduce, to_gather = wire, wire
    if strategy == "ddp":
        return compute + max(0.0, 2 * to_reduce - backward) + UPDATE_BYTES * p / cluster.memory_bytes_per_s
    shard = p / ranks
    if strategy == "ddp_sharded":
        return compute + max(0.0, to_reduce - backward) + UPDATE_BYTES * shard / cluster.memory_bytes_per_s + to_gather
    on_node = min(ranks, cluster.gpus_per_node)
    down, up = 2 * shard / cluster.pcie_bytes_per_s, 2 * shard / cluster.pcie_bytes_per_s
    update = UPDATE_BYTES * shard * on_node / cluster.host_bytes_per_s
    return compute + max(0.0, to_reduce - backward, down - backward) + max(update, up) + to_gather


def cluster_table(cluster, model):
    """TFLOPS per GPU by strategy and number of GPUs, without recomputation, and from where ddp_sharded is ahead."""
    strategies = ["ddp", "ddp_sharded", "zero_offload"]
    print(f"\ncomputed, not measured: {cluster.name}; {model.parameters / 1e9:.0f} billion parameters, up to {model.batch} "
          f"samples of {model.tokens} tokens a GPU; TFLOPS of a GPU")
    print("GPUs   " + "".join(f"{strategy:>14}" for strategy in strategies))
    crossing, first = None, {}
    for ranks in (1, 2, 4, 8, 16, 32, 64, 128):
        tflops = {}
        for strategy in strategies:
            batch = batch_of(strategy, cluster, model, ranks)
            if batch > 0:
                seconds = cluster_step_s(strategy, cluster, model, ranks, batch)
                tflops[strategy] = 6e-12 * model.parameters * batch * model.tokens / seconds
                first.setdefault(strategy, (ranks, tflops[strategy]))
        print(f"{ranks:<7}" + "".join(f"{tflops[s]:>14.1f}" if s in tflops else f"{'does not fit':>14}" for s in strategies))
        if crossing is None and tflops.get("ddp_sharded", 0) > tflops["zero_offload"]:
            crossing = ranks
        last = tflops
    print(f"ddp_sharded is ahead of zero_offload from {crossing} GPUs on" if crossing else
          "zero_offload stays ahead of ddp_sharded up to 128 GPUs")
    ranks, alone = first["zero_offload"]
    print(f"zero_offload on 128 GPUs: {last['zero_offload'] / alone:.2f} of the speed per GPU on {ranks}")


def main():
    program = sys.argv[1]
    rounds = int(sys.argv[2]) if len(sys.argv) > 2 else ROUNDS
    worst = check_on_this_host(program, rounds)
    print(f"largest error: {worst:.1%}")
    cluster_table(DGX2, GPT_10B)


if __name__ == "__main__":
    main()
