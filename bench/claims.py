#!/usr/bin/env python3
"""Measures what the articles about sharded training and ZeRO-Offload claim, and writes docs/claims.md: for each claim what
the article says, what was found here, and by which command. Each claim takes from seconds to ten minutes on two cores, and
nothing else should run meanwhile. Rows of a Python package that cannot be imported (deepspeed, fairscale) are left out, and the
section says which and why; what needs a GPU that is not there is computed.

  ./bazelw run //bench:claims                all
  ./bazelw run //bench:claims -- memory      those named; the others stay as they are
  ./bazelw run //bench:claims -- --packages=FOLDER
      with Python packages from there: pip install --no-deps --target=FOLDER deepspeed==0.19.8 fairscale==0.4.13, and
      what these need
"""
import datetime
import functools
import os
import pathlib
import re
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass

import largest_model
import report

HEAD = """# What the articles claim, and what is measured

Written by `./bazelw run //bench:claims`. The articles are Lightning's about sharded training, which shows a BERT classifier
and four families of models (Transformer, SwAV, DeepSpeech 2, Image GPT), and ZeRO-Offload (Ren et al. 2021,
arXiv:2101.06840). Theirs ran on GPUs, these figures are of a CPU unless a row says otherwise, so they compare ratios. A figure
is called counted if it follows from the sizes of tensors, and computed if it follows from a formula; all others were measured.
Times are medians of runs in turn, unless a table says otherwise. The titles are the articles' claims. Each section ends with its
date and machine; [benchmarks.md](benchmarks.md) has some of these comparisons on other machines, with other ratios.

A command that begins with `bazel-bin/` or `python3` is to be run after `./bazelw build //bench:claims`, with
`OMP_NUM_THREADS=1`; that Python needs torch, and for some rows the packages that are named beside them.
"""

FOLDER = pathlib.Path(__file__).parent.absolute()
RUNFILES = FOLDER.parent.parent  # of `bazel run`: this workspace, and the repositories of data
EXAMPLE_STEP = FOLDER / "example_step"
MINILM = RUNFILES / "minilm"
DIGITS = f"--data.file={RUNFILES / 'digits/digits.csv.gz'}"
BERT = [f"--model.weights={MINILM}", "--model.size=article", "--data.batch_size=2", "--data.max_length=64"]
QUIET = ["--enable_progress_bar=false", "--enable_model_summary=false", "--logger=false"]

# The articles' families, each with the dimensions of its own paper, and a batch that suits one core.
FAMILIES = {
    "BERT-base": ("bert_classifier", BERT),
    "Transformer (GPT-2 small's layers, bytes as tokens)": ("transformer_lm", ["--model.size=article", "--model.context=128",
                                                                               "--data.batch_size=1"]),
    "Image GPT (iGPT-S)": ("image_gpt", [DIGITS, "--model.size=article", "--data.batch_size=2"]),
    "SwAV (ResNet-50)": ("swav", [DIGITS, "--model.size=article", "--data.batch_size=2", "--data.crops.large_size=224",
                                  "--data.crops.small_size=96", "--data.crops.num_small=2"]),
    "DeepSpeech 2": ("deepspeech2", [f"--data.path={FOLDER.parent / 'examples/deepspeech2/spoken_digits'}",
                                     "--model.size=article", "--data.batch_size=2"]),
    "ResNet-50": ("resnet", [DIGITS, "--model.size=article", "--data.batch_size=2", "--data.image_size=224"]),
}


def shown(command):
    """As a reader would type it, after a build."""
    words = []
    for word in map(str, command):
        word = word.replace(str(FOLDER.parent), "bazel-bin").replace(str(RUNFILES), "bazel-bin/bench/claims.runfiles")
        word = word.replace(sys.executable, "python3")
        words.append(word.replace("bazel-bin/bench/", "bench/") if word.endswith(".py") else word)
    return " ".join(words)


def output_of(command, **environment):
    print(" ".join(["$", *(f"{name}={value}" for name, value in environment.items()), shown(command)]), flush=True)
    start = time.monotonic()
    done = subprocess.run([str(word) for word in command], stdout=subprocess.PIPE, encoding="latin-1", check=True,
                          env={**os.environ, "OMP_NUM_THREADS": "1", "DS_ACCELERATOR": "cpu",
                               "BUILD_WORKING_DIRECTORY": tempfile.gettempdir(), **environment})
    print(f"  {time.monotonic() - start:.0f} s", flush=True)
    return done.stdout


def found(pattern, text):
    match = re.search(pattern, text, re.M)
    if match is None:
        sys.exit(f"claims: no '{pattern}' in what a program has printed:\n{text}")
    return match


def table(head, rows):
    return "\n".join(["| " + " | ".join(head) + " |", "|" + "---|" * len(head)] + ["| " + " | ".join(row) + " |" for row in rows])


def code(text):
    return f"```text\n{text.strip()}\n```"


def script(name, *arguments):
    return [sys.executable, FOLDER / f"{name}.py", *arguments]


# Memory.

# With this malloc hands freed memory back, so that what a process has is what it uses. Steps are slower then.
EXACT_MEMORY = {"MALLOC_MMAP_THRESHOLD_": "1000000", "MALLOC_TRIM_THRESHOLD_": "1000000"}


def family_run(example, flags, strategy, steps, **environment):
    command = [EXAMPLE_STEP, example, *flags, f"--strategy={strategy}", "--devices=2", f"--steps={steps}", "--warm_up=1",
               "--pool=2", *QUIET]
    said = output_of(command, **environment)
    before, peak = (float(mb) for mb in found(r"^MB before the model: (\S+), at most: (\S+)$", said).groups())
    counted = {int(n): {kind: int(size) / 1e6 for kind, size in re.findall(r"(\w+) (\d+)", rest)}
               for n, rest in re.findall(r"^bytes of (\d+): (.*)$", said, re.M)}
    return {"us": float(found(r"^us/step: (\S+)$", said)[1]), "mb": peak - before, "counted": counted, "command": shown(command)}


def families():
    counts, speeds, commands = [], [], []
    for name, (example, flags) in FAMILIES.items():
        ddp, sharded = (family_run(example, flags, strategy, 3, **EXACT_MEMORY) for strategy in ("ddp", "ddp_sharded"))
        us = {strategy: family_run(example, flags, strategy, 5)["us"] for strategy in ("ddp", "ddp_sharded")}
        in_all = lambda run, n: sum(run["counted"][n].values())
        of_model = lambda run, n: in_all(run, n) - run["counted"][n]["buckets"]
        for run, strategy, n in ((ddp, "ddp", 2), (sharded, "ddp_sharded", 2), (sharded, "ddp_sharded", 8)):
            counted = run["counted"][n]
            counts.append([f"{name}, {ddp['counted'][1]['parameters'] / 4:.0f} M parameters" if run is ddp else "",
                           strategy if run is ddp else f"{strategy}, {n} ranks",
                           *(f"{counted[kind]:.0f}" for kind in ("parameters", "gradients", "optimizer", "buckets")),
                           f"{in_all(run, n):.0f}",
                           "" if run is ddp else f"{1 - in_all(run, n) / in_all(ddp, n):.0%}",
                           "" if run is ddp else f"{of_model(ddp, n) / of_model(run, n):.1f}"])
        speeds.append([name, f"{ddp['mb']:.0f}", f"{sharded['mb']:.0f}", f"{1 - sharded['mb'] / ddp['mb']:.0%}",
                       f"{ddp['mb'] - in_all(ddp, 2):.0f}, {sharded['mb'] - in_all(sharded, 2):.0f}",
                       f"{us['ddp_sharded'] / us['ddp']:.2f}"])
        commands.append(sharded["command"])
    return (table(["counted, MB of a rank", "", "parameters", "gradients", "optimizer state", "buckets", "in all", "saved",
                   "parameters in the same memory"], counts) + "\n\n" +
            table(["measured, 2 ranks: MB above an empty process, at most", "ddp", "ddp_sharded", "saved",
                   "of which not counted, in each", "step over ddp's"], speeds) +
            "\n\nCounted are parameters, gradients, optimizer state and buckets (`estimate_memory`; "
            "`tests/strategies/model_state_bytes_test.cc` finds the same by counting allocations, to 3%); what is not counted is "
            "mostly activations. The last column of the first table is for large models, beside which buckets, whose size is fixed, "
            "are nothing. DeepSpeech 2 and SwAV use AdamW here, ResNet-50 SGD with momentum. In fp32 and without buckets, "
            "sharding saves 37.5% with Adam on 2 ranks and 65.6% on 8 (of 16 bytes per parameter 4 + 12 / N stay), with momentum "
            "33.3% and 58.3% (of 12 bytes 4 + 8 / N); two buckets of 25 MiB (`bucket_cap_mib`) take from that, the more the "
            "smaller the model: SwAV and ResNet-50, the smallest two, stay below the 60% on 8 ranks. Models with "
            "SyncBatchNorm (SwAV, DeepSpeech 2, ResNet-50) take memory for further buckets while "
            "the sums of earlier ones have not arrived: their backward may not wait for other ranks, because these may be "
            "waiting in a norm. Memory was measured with `MALLOC_MMAP_THRESHOLD_=1000000 MALLOC_TRIM_THRESHOLD_=1000000`: without "
            "these glibc keeps much of what was freed. Batches are small and inputs short, so that two ranks fit on two cores; the "
            "Transformer has a vocabulary of 256 bytes, the images are the digits of 8 x 8, enlarged except for Image GPT. A step of "
            "`ddp_sharded` moves as many bytes as one of `ddp`, and updates half as many parameters; in one pair of runs of "
            "five steps, of which the last three are timed, on a shared machine a tenth either way says nothing.\n\n"
            "The same with `--strategy=ddp`, and with `--steps=5` for the times:\n\n" + code("\n".join(commands)))


def depth_below(cap_mb, strategy):
    """The most layers of 1,024 x 1,024 with which rank 0 of two never has more than the cap."""
    @functools.cache
    def peak_mb(depth):
        command = [FOLDER / "ddp_step", "--width=1024", f"--depth={depth}", "--steps=1", f"--strategy={strategy}", "--devices=2"]
        return float(output_of(command, **EXACT_MEMORY).split("\n")[-2].split()[3])
    layer_mb = (peak_mb(16) - peak_mb(8)) / 8
    depth = max(0, int(8 + (cap_mb - peak_mb(8)) / layer_mb))  # nearly: each layer takes the same
    while depth > 0 and peak_mb(depth) > cap_mb:
        depth -= 1
    while peak_mb(depth + 1) <= cap_mb:
        depth += 1
    return depth


def largest():
    cap_mb = 1000
    depth = {strategy: depth_below(cap_mb, strategy) for strategy in ("ddp", "ddp_sharded")}
    if not all(depth.values()):
        return f"Not even one layer of 1,024 x 1,024 fits into {cap_mb} MB, with libtorch itself in it."
    ratio = depth["ddp_sharded"] / depth["ddp"]
    millions = {strategy: layers * (1024 + 1) * 1024 / 1e6 for strategy, layers in depth.items()}
    return (f"The largest model whose process never has more than {cap_mb} MB, with libtorch itself in it, on 2 ranks: "
            f"{millions['ddp']:.0f} million parameters with `ddp`, {millions['ddp_sharded']:.0f} million with "
            f"`ddp_sharded`, {ratio:.2f} times as many, where 16 bytes over 10 are 1.60 times: the two buckets, of 52 MB in all, take the "
            "rest. On 8 ranks, with activations and buckets, a GPT with 1.9 times as many parameters fits "
            "(`tests/examples/largest_model_test.cc`).\n\n"
            f"`{shown([FOLDER / 'ddp_step', '--width=1024', '--depth=DEPTH', '--steps=1', '--strategy=STRATEGY', '--devices=2'])}`")


def memory():
    return ("The article: over 60% of memory saved, twice as many parameters, no slowdown, on 8 GPUs.\n\n" + families() + "\n\n" +
            largest())


# One device.

def one_device():
    said = output_of(script("largest_model", FOLDER / "largest_model"))
    if largest_model.device_bytes() is None:
        rows = []
        for cap in largest_model.CAPS:
            billions = [cap * largest_model.GIB / bytes_per_parameter / 1e9 for bytes_per_parameter in (16, 2)]
            rows.append([f"{cap} GiB", *(f"{number:.2f}" for number in billions), f"{billions[1] / billions[0]:.1f}"])
        where = ("\n\nMeasured on an H200, activations and buckets included: [gpu.md](gpu.md#measured), by "
                 "`./bazelw build //bench:largest_model && python3 bench/largest_model.py bazel-bin/bench/largest_model`.")
        said = ("By arithmetic: Adam keeps 16 bytes per parameter on the device, in fp32 as in mixed "
                "precision; `zero_offload` with `bf16-true` keeps 2, beside two buckets, which do not grow with the model:\n\n" +
                table(["model state of at most", "single_device, billion parameters", "zero_offload", "times"], rows))
    else:
        said, where = code(said), ""
    return ("The article: 13 billion parameters on one V100 of 32 GB, where PyTorch trains 1.4 billion: ten times as many. "
            "Eight times is what the arithmetic of model state gives; the rest is in activations, and in what an allocator "
            "loses.\n\n" + said + where)


# CPU Adam.

def adam():
    command = script("python_adamw", FOLDER / "adamw_kernel")
    said = output_of(command)
    rows, label = [], ""
    for line in said.splitlines():
        if head := re.match(r"(\d+) parameters, (\d+) thread", line):
            label = f"{int(head[1]) / 1e6:.0f} M, {head[2]} thread{'s' if head[2] != '1' else ''}"
        elif row := re.match(r"(fp32|bf16)(.*?) {2,}[\d.]+ +[\d.]+ +([\d.]+) +\(([\d.]+) \.\. ([\d.]+)\)", line):
            rows.append([label, f"{row[1]}{row[2]}", row[3], f"{row[4]} to {row[5]}"])
    if not rows:
        sys.exit(f"claims: bench/python_adamw.py has printed no figures:\n{said}")
    missing = "".join(f"\n\n{line}" for line in said.splitlines() if line.startswith("without the rows"))
    return ("The article: its CPU Adam is up to six times as fast as PyTorch's. How many times as long as `optim::AdamW` another "
            "optimizer takes for its step:\n\n" + table(["parameters", "the other", "times", "rounds"], rows) + missing +
            "\n\nAbove 10 million parameters the memory limits both fused ones, which read and write the same bytes."
            f"\n\n`{shown(command)}`")


# Delayed updates.

def late():
    speed = [FOLDER / "offload_step", "3"]
    rows = [[*row[:4], f"{row[4]} ({row[5]} to {row[6]})"] for row in re.findall(
        r"^(batches of .*)\n(?:.*\n)*?update / \(forward and backward\) ([\d.]+): delayed_update ([\d.]+) times as fast as "
        r"zero_offload \(both cores for everything: ([\d.]+)\), and ([\d.]+) of the step without prediction "
        r"\(rounds: ([\d.]+) \.\. ([\d.]+)\)",
        output_of(speed), re.M)]
    if not rows:
        sys.exit("claims: bench/offload_step has printed no figures")
    with tempfile.TemporaryDirectory() as runs:
        quality = script("convergence", FOLDER.parent / "examples", "--only=article", f"--minilm={MINILM}",
                         f"--digits={RUNFILES / 'digits/digits.csv.gz'}")
        said = output_of([*quality, f"--runs={runs}"])
    return ("The article: the delayed update is 1.12 to 1.59 times as fast where batches are small, and accuracy does not change "
            "if it begins after tens of steps.\n\n" +
            table(["", "update over forward and backward", "delayed_update over zero_offload, speed",
                   "single_device on both cores over zero_offload, speed", "step over that without prediction, rounds"], rows) +
            "\n\nHere `zero_offload` has one thread, for the step and the update in turn, as a GPU and its host would take turns; "
            "`delayed_update` has one for each. A table is a matrix that costs forward and backward little, and the update as "
            "much as any. Where the first figure is above 1 the update is the longer of the two, and prediction adds the arithmetic "
            "of a second AdamW rule to it. Speeds depend on the machine: "
            "[benchmarks.md](benchmarks.md#zero_offload-and-delayed_update) has another run of the same program."
            "\n\nThe last value on validation data with delayed updates over that without, the same seeds: the "
            "mean, and least to most. `none` is the article's update; `gradient`, the default, trains on the weights that it expects next "
            "([strategies.md](strategies.md)). Both begin after 40 steps on time. For `val_acc` more is better, for the others "
            "less. The BERT is far from what it can reach at this rate in so few steps, and the digits' validation set has 180 samples: "
            "12 epochs of the one, and the test set of the other with ten seeds, are in [strategies.md](strategies.md).\n\n" + code(said) +
            f"\n\n`{shown(speed)}`, `{shown(quality)} --runs=FOLDER`")


# Others.

def others():
    commands = [script("python_offload", FOLDER / "ddp_step", "2"),
                script("python_sharded", FOLDER / "ddp_step", "3", "--only=times")]
    offload, sharded = map(output_of, commands)
    of_pytorch = found(r"^20 M parameters, 32 +PyTorch .*, ([\d.]+) of zero_offload's", offload)[1]
    return ("The article: faster than PyTorch, Megatron, ZeRO-2 and L2L on one GPU, for models that these can train at all. On a "
            "CPU, where device and host are one memory, what remains is how well each does its part. `zero_offload` moves gradients "
            "to buckets of the host and weights back to the parameters, which on a GPU saves memory, and here only takes time. In "
            f"fp32 a step of PyTorch takes {of_pytorch} of the time of one of `zero_offload`:\n\n" + code(offload) +
            f"\n\n`{shown(commands[0])}`\n\n" + code(sharded) + f"\n\n`{shown(commands[1])}`\n\n"
            "These ratios depend on the machine: [benchmarks.md](benchmarks.md#ddp_sharded) has another run of this program.\n\n"
            "Computed, on one GPU, in bytes per parameter:\n\n" + table(
                ["", "kept on the device", "moved between device and host in a step"],
                [["PyTorch, Megatron, ZeRO-2", "16", "0"],
                 ["L2L", "2, of one layer at a time", "28: 2 for forward, 2 for backward, Adam's 12 there and back"],
                 ["`zero_offload`", "2", "4: gradients down, parameters up"]]))


def scaling():
    command = script("scaling", FOLDER / "ddp_step", "2")
    return ("The article: near-linear to 128 GPUs; ZeRO-Offload is ahead of ZeRO-2 up to 32 GPUs, and ZeRO-2 slightly ahead at 64 "
            "to 128. `bench/scaling.py` has two models of a step. That of ranks that share a host's memory is fitted at 1 and 2 "
            "ranks here, and checked at 3 and 4. That of a cluster has its constants from the article and data sheets; nothing "
            "here checks it:\n\n" +
            code(output_of(command)) + "\n\nA core that two of three ranks share is not what the model of a host assumes, which spreads "
            "three ranks over two cores evenly; both strategies are fitted on their own, so that a constant of one also takes up what "
            "the model leaves out of it. The model of a cluster knows no loss of speed in small batches, and hides all that "
            "NVLink carries, so that ddp_sharded is ahead as soon as it fits. `./bazelw run //tools:scale` computes the same "
            "cluster with other TFLOPS, because its assumptions differ: "
            "[scale.md](scale.md#10-billion-parameters-on-dgx-2-as-in-the-zero-offload-article) lists them.\n\n"
            f"`{shown(command)}`")


def lines():
    with open(FOLDER.parent / "examples/foreign_module/main.cc") as file:
        source = file.read()
    wrapper = found(r"^struct Digits : Module \{\n(?:.*\n)*?\};", source)[0]
    count = sum(1 for line in wrapper.splitlines() if line.strip())
    program = FOLDER.parent / "examples/foreign_module/foreign_module"
    rows = []
    for strategy, *flags in (("single_device",), ("dp", "--devices=2"), ("ddp", "--devices=2", "--data.batch_size=16"),
                             ("ddp_sharded", "--devices=2", "--data.batch_size=16"), ("zero_offload",),
                             ("delayed_update", "--strategy.warmup_steps=10")):
        flags = [f"--strategy={strategy}", *flags]
        with tempfile.TemporaryDirectory() as folder:
            command = [program, DIGITS, *flags, f"--default_root_dir={folder}", "--max_epochs=3", "--seed=1"]
            accuracy = found(r"^val_acc +([\d.]+)$", output_of(command))[1]
        rows.append([f"`{' '.join(flags)}`", f"{float(accuracy):.3f}"])
    return (f"The articles: a few lines of code, one flag. A `torch::nn::Module` that knows nothing of fulgur takes a wrapper of "
            f"{count} lines (`examples/foreign_module/main.cc`). The strategy is a flag of the same program: one executable file "
            "ran all rows, so that 0 lines differ between them. Where each rank reads batches of its own, they are half as large "
            "here, and the first 10 updates of `delayed_update` are on time instead of 300, so that there are late ones in so short "
            "a run. The replicas of `dp` draw dropout from one generator in no particular order, so that its accuracy is another "
            "one:\n\n" +
            table(["flags", "val_acc after 3 epochs"], rows) +
            f"\n\n`./bazelw run //examples/foreign_module -- FLAGS --max_epochs=3 --seed=1`")


def lightning():
    command = script("python_examples", EXAMPLE_STEP, MINILM)
    return ("Not in the articles: the same models, weights, batches, schedules and optimizers in Lightning, one thread. At full "
            "size a step is mostly matrix products, which both leave to the same libtorch. Aimed at was that Lightning, as it "
            "comes, takes 1.1 times as long at full size, and twice as long at the small one.\n\n" + code(output_of(command)) +
            f"\n\n`{shown(command)}`")


@dataclass
class Claim:
    key: str
    title: str
    measure: object


CLAIMS = [
    Claim("memory", "Sharding saves over 60% of memory", memory),
    Claim("one_device", "Ten times the model on one device", one_device),
    Claim("adam", "CPU Adam, six times PyTorch's", adam),
    Claim("late", "Delayed updates: faster, accuracy unchanged after tens of steps", late),
    Claim("others", "Beside PyTorch, ZeRO-2, Megatron and L2L", others),
    Claim("scaling", "Near-linear to 128 GPUs", scaling),
    Claim("lines", "A few lines, one flag", lines),
    Claim("lightning", "Beside Lightning", lightning),
]


def page_of(claims, sections):
    seconds = sum(int(found(r"(\d+) s\.$", sections[claim.title])[1]) for claim in claims)
    total = f"All {len(claims)} sections took {seconds / 60:.0f} minutes.\n"
    return f"{HEAD}\n{total}" + "".join(f"\n## {claim.title}\n\n{sections[claim.title]}\n" for claim in claims)


def main():
    keys = [claim.key for claim in CLAIMS]
    for flag in [argument for argument in sys.argv[1:] if argument.startswith("--packages=")]:
        folder = os.path.join(os.environ.get("BUILD_WORKING_DIRECTORY", os.getcwd()), flag.removeprefix("--packages="))
        sys.path.append(folder)
        os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, [os.environ.get("PYTHONPATH"), folder]))
    wanted = [argument for argument in sys.argv[1:] if not argument.startswith("--packages=")] or keys
    if unknown := set(wanted) - set(keys):
        sys.exit(f"there is no claim {sorted(unknown)}; there are {keys}")
    page = pathlib.Path(os.environ.get("BUILD_WORKSPACE_DIRECTORY", os.getcwd())) / "docs/claims.md"
    sections = report.sections_of(page.read_text()) if page.exists() else {}
    for claim in CLAIMS:
        if claim.key not in wanted:
            continue
        start = time.monotonic()
        text = claim.measure()
        seconds = time.monotonic() - start
        print(f"{claim.key}: {seconds:.0f} s", flush=True)
        sections[claim.title] = f"{text}\n\n{datetime.date.today()}, {report.machine()}, {seconds:.0f} s."
        page.write_text(page_of([claim for claim in CLAIMS if claim.title in sections], sections))


if __name__ == "__main__":
    main()
