#!/usr/bin/env python3
"""Measures what the articles about sharded training and ZeRO-Offload claim, and writes docs/claims.md: for each claim what
the article says, what was found here, and by which command. Each claim takes from seconds to ten minutes on two cores, and
nothing else should run meanwhile. What needs a Python package that is not there (deepspeed, fairscale) or a GPU says so in its place.

  ./bazelw run //bench:claims                all
  ./bazelw run //bench:claims -- memory      those named; the others stay as they are
  ./bazelw run //bench:claims -- --packages=FOLDER
      with Python packages from there: pip install --no-deps --target=FOLDER deepspeed==0.19.8 fairscale==0.4.13, and
      what these need
"""
import datetime
import importlib.util
import os
import pathlib
import re
import statistics
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
Times are medians of runs in turn.
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
    "Transformer (GPT-2 small)": ("transformer_lm", ["--model.n_layer=12", "--model.n_head=12", "--model.n_embd=768",
                                                     "--model.context=128", "--data.batch_size=1"]),
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
    done = subprocess.run([str(word) for word in command], stdout=subprocess.PIPE, encoding="latin-1", check=True,
                          env={**os.environ, "OMP_NUM_THREADS": "1", "DS_ACCELERATOR": "cpu",
                               "BUILD_WORKING_DIRECTORY": tempfile.gettempdir(), **environment})
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


def has(package):
    return importlib.util.find_spec(package) is not None


def script(name, *arguments):
    return [sys.executable, FOLDER / f"{name}.py", *arguments]


# Memory.

# With this malloc hands freed memory back, so that what a process has is what it uses. Steps are slower then.
EXACT_MEMORY = {"MALLOC_MMAP_THRESHOLD_": "1000000", "MALLOC_TRIM_THRESHOLD_": "1000000"}


def family_run(example, flags, strategy, devices, **environment):
    command = [EXAMPLE_STEP, example, *flags, f"--strategy={strategy}", f"--devices={devices}", "--steps=3", "--warm_up=1",
               "--pool=2", *QUIET]
    said = output_of(command, **environment)
    before, peak = (float(mb) for mb in found(r"^MB before the model: (\S+), at most: (\S+)$", said).groups())
    counted = {int(n): sum(map(int, re.findall(r"\d+", rest)))
               for n, rest in re.findall(r"^bytes of (\d+): (.*)$", said, re.M)}
    parameters = int(found(r"^bytes of 1: parameters (\d+)", said)[1]) // 4
    return {"us": float(found(r"^us/step: (\S+)$", said)[1]), "mb": peak - before, "counted": counted,
            "parameters": parameters, "command": shown(command)}


def families():
    sizes, speeds, command = [], [], ""
    for name, (example, flags) in FAMILIES.items():
        strategies = ("ddp", "ddp_sharded")
        kept = {strategy: family_run(example, flags, strategy, 2, **EXACT_MEMORY) for strategy in strategies}
        timed = [{strategy: family_run(example, flags, strategy, 2)["us"] for strategy in strategies} for _ in range(2)]
        ddp, sharded = kept.values()
        mb = lambda run, n: run["counted"][n] / 1e6
        saved = lambda n: 1 - mb(sharded, n) / mb(ddp, n)
        sizes.append([name, f"{ddp['parameters'] / 1e6:.0f} M", f"{mb(ddp, 2):.0f}", f"{mb(sharded, 2):.0f} ({saved(2):.0%} less)",
                      f"{mb(sharded, 8):.0f} ({saved(8):.0%} less)", f"{mb(ddp, 8) / mb(sharded, 8):.1f}"])
        ratios = [us["ddp_sharded"] / us["ddp"] for us in timed]
        speeds.append([name, f"{ddp['mb']:.0f}", f"{sharded['mb']:.0f}", f"{1 - sharded['mb'] / ddp['mb']:.0%}",
                       f"{ddp['mb'] - mb(ddp, 2):.0f}, {sharded['mb'] - mb(sharded, 2):.0f}",
                       f"{statistics.median(ratios):.2f} ({min(ratios):.2f} to {max(ratios):.2f})"])
        command = sharded["command"] if example == "bert_classifier" else command
    return (table(["counted, MB of a rank", "parameters", "ddp", "ddp_sharded, 2 ranks", "ddp_sharded, 8 ranks",
                   "parameters in the same memory, 8 ranks"], sizes) + "\n\n" +
            table(["measured, 2 ranks: MB above an empty process, at most", "ddp", "ddp_sharded", "saved",
                   "of which activations, in each", "step over ddp's"], speeds) +
            "\n\nCounted are parameters, gradients, optimizer state and buckets, without activations (`estimate_memory`; "
            "`tests/strategies/model_state_bytes_test.cc` finds the same by counting allocations, to 3%). DeepSpeech 2 and SwAV "
            "use AdamW here, ResNet-50 SGD with momentum. Below 60% are the models for which two buckets of 25 MiB "
            "(`bucket_cap_mib`) are not small. Models with SyncBatchNorm (SwAV, DeepSpeech 2, ResNet-50) keep all gradients of a "
            "backward until its end, beside the activations: a rank that waited for memory in the middle of it could wait for one "
            "that waits for it in the norm. Memory was measured with `MALLOC_MMAP_THRESHOLD_=1000000 "
            "MALLOC_TRIM_THRESHOLD_=1000000`: without these glibc keeps much of what was freed.\n\n"
            f"`{command}`, and so on for each family, with `ddp` in turn.")


def depth_below(cap_mb, strategy):
    """The most layers of 1,024 x 1,024 whose peak on each of two ranks stays below the cap."""
    def fits(depth):
        command = [FOLDER / "ddp_step", "--width=1024", f"--depth={depth}", "--steps=6", f"--strategy={strategy}", "--devices=2"]
        return float(output_of(command).split("\n")[-2].split()[3]) <= cap_mb
    if not fits(1):
        sys.exit(f"claims: not even one layer of {strategy} fits into {cap_mb} MB")
    low, high = 1, 2
    while fits(high):
        low, high = high, 2 * high
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if fits(middle) else (low, middle)
    return low


def largest():
    cap_mb = 1000
    depth = {strategy: depth_below(cap_mb, strategy) for strategy in ("ddp", "ddp_sharded")}
    ratio = depth["ddp_sharded"] / depth["ddp"]
    return (f"The largest model whose process never has more than {cap_mb} MB, with libtorch itself in it, on 2 ranks: "
            f"{depth['ddp'] * 1.05:.0f} million parameters with `ddp`, {depth['ddp_sharded'] * 1.05:.0f} million with "
            f"`ddp_sharded`, {ratio:.2f} times as many, where 16 bytes over 10 are 1.60 times.\n\n"
            f"`{shown([FOLDER / 'ddp_step', '--width=1024', '--depth=DEPTH', '--steps=6', '--strategy=STRATEGY', '--devices=2'])}`")


def memory():
    return ("The article: over 60% of memory saved, twice as many parameters, no slowdown, on 8 GPUs.\n\n" + families() + "\n\n" +
            largest())


# One device.

def one_device():
    said = output_of(script("largest_model", FOLDER / "largest_model"))
    if largest_model.device_bytes() is None:
        said = ("There is no GPU here, so this is counted. Adam keeps 16 bytes per parameter on the device, in fp32 as in mixed "
                "precision; `zero_offload` with `bf16-true` keeps 2, and two buckets:")
        run = output_of([EXAMPLE_STEP, "bert_classifier", *BERT, "--steps=3", "--warm_up=1", "--pool=1", *QUIET])
        parameters = int(found(r"^bytes of 1: parameters (\d+)", run)[1]) // 4
        rows = [[f"{cap} GiB", f"{cap * largest_model.GIB / 16e9:.2f}", f"{cap * largest_model.GIB / 2e9:.2f}", "8.0"]
                for cap in largest_model.CAPS]
        said += "\n\n" + table(["model state of at most", "single_device, billion parameters", "zero_offload", "times"], rows)
        said += (f"\n\nBERT-base has {parameters / 1e6:.0f} million: {16 * parameters / 1e6:.0f} MB on the device become "
                 f"{2 * parameters / 1e6:.0f} MB.")
    else:
        said = code(said)
    return ("The article: 13 billion parameters on one V100 of 32 GB, where PyTorch trains 1.4 billion: ten times as many. "
            "Eight times is what the arithmetic of model state gives; the rest is in activations, and in what an allocator "
            "loses.\n\n" + said + "\n\n"
            "`./bazelw build //bench:largest_model && python3 bench/largest_model.py bazel-bin/bench/largest_model`")


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
    return ("The article: its CPU Adam is up to six times as fast as PyTorch's. Times that PyTorch's step takes as long as "
            "`optim::AdamW`'s:\n\n" + table(["parameters", "over", "times", "rounds"], rows) +
            ("" if has("deepspeed") else "\n\nDeepSpeed was not here.") + f"\n\n`{shown(command)}`")


# Late updates.

def late():
    speed = [FOLDER / "offload_step", "5"]
    rows = [[load, *figures] for load, *figures in re.findall(
        r"^(batches of .*)\n(?:.*\n)*?update / \(forward and backward\) ([\d.]+): delayed_update ([\d.]+) times as fast as "
        r"zero_offload .*, and ([\d.]+) of the step without prediction", output_of(speed), re.M)]
    if not rows:
        sys.exit("claims: bench/offload_step has printed no figures")
    with tempfile.TemporaryDirectory() as runs:
        quality = script("convergence", FOLDER.parent / "examples", "--only=article")
        said = output_of([*quality, f"--runs={runs}"])
    return ("The article: the delayed update is 1.12 to 1.59 times as fast where batches are small, and accuracy does not change "
            "if it begins after tens of steps.\n\n" +
            table(["", "update over forward and backward", "times as fast as zero_offload", "step over that without prediction"],
                  rows) +
            "\n\nThe best value on validation data with late updates over that without, the same seeds: the mean, and least to "
            "most. `none` is the article's update; `gradient`, the default, trains on the weights that it expects next "
            "([strategies.md](strategies.md)). For `val_acc` more is better, for the others less.\n\n" + code(said) +
            f"\n\n`{shown(speed)}`, `{shown(quality)} --runs=FOLDER`")


# Others.

def others():
    text = ["The article: faster than PyTorch, Megatron, ZeRO-2 and L2L on one GPU, for models that these can train at all. On a "
            "CPU, where device and host are one memory, what remains is how well each does its part."]
    for package, name, *flags in (("deepspeed", "python_offload"), ("fairscale", "python_sharded", "--only=times")):
        command = script(name, FOLDER / "ddp_step", "1", *flags)
        if has(package):
            text.append(code(output_of(command)) + f"\n\n`{shown(command)}`")
        else:
            text.append(f"{package} was not here: install it beside torch and run `{shown(command)}`.")
    text.append("Computed, bytes of the device and bytes that move between device and host in a step, per parameter: PyTorch, and "
                "Megatron and ZeRO-2 on one GPU, 16 and 0; L2L 2 of one layer, and 28 (parameters in for forward and backward, 2 "
                "each, the optimizer's 12 in and out); `zero_offload` 2 and 4.")
    return "\n\n".join(text)


def scaling():
    command = script("scaling", FOLDER / "ddp_step", "3")
    return ("The article: near-linear to 128 GPUs; ZeRO-Offload is ahead of ZeRO-2 up to 32 GPUs, and ZeRO-2 slightly ahead at 64 "
            "to 128. The model of `bench/scaling.py`, fitted at 1 and 2 ranks of this host, checked at 3 and 4, then computed:\n\n" +
            code(output_of(command)) + "\n\nThe model knows no loss of speed in small batches, so that ddp_sharded is ahead as "
            f"soon as it fits.\n\n`{shown(command)}`")


def lines():
    with open(FOLDER.parent / "examples/foreign_module/main.cc") as file:
        source = file.read()
    wrapper = found(r"^struct Digits : Module \{\n(?:.*\n)*?\};", source)[0]
    count = sum(1 for line in wrapper.splitlines() if line.strip())
    program = FOLDER.parent / "examples/foreign_module/foreign_module"
    rows = []
    for strategy, devices in (("single_device", 1), ("dp", 2), ("ddp", 2), ("ddp_sharded", 2), ("zero_offload", 1),
                              ("delayed_update", 1)):
        with tempfile.TemporaryDirectory() as folder:
            command = [program, DIGITS, f"--strategy={strategy}", f"--devices={devices}", f"--default_root_dir={folder}",
                       "--max_epochs=3", "--seed=1"]
            accuracy = found(r"^val_acc +([\d.]+)$", output_of(command))[1]
        rows.append([strategy, "0", f"{float(accuracy):.3f}"])
    return (f"The articles: a few lines of code, one flag. A `torch::nn::Module` that knows nothing of fulgur takes a wrapper of "
            f"{count} lines (`examples/foreign_module/main.cc`), and the strategy is a flag of the same program:\n\n" +
            table(["--strategy", "lines changed", "val_acc after 3 epochs"], rows) +
            f"\n\n`{shown([program, '--strategy=STRATEGY', '--max_epochs=3', '--seed=1'])}`")


def lightning():
    command = script("python_examples", EXAMPLE_STEP, MINILM, "2")
    if not has("lightning"):
        return f"lightning was not here: install it beside torch and run `{shown(command)}`."
    return ("Not in the articles: the same models, weights, batches, schedules and optimizers in Lightning, one thread. At full "
            "size a step is mostly matrix products, which both leave to the same libtorch.\n\n" + code(output_of(command)) +
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
    Claim("late", "Delayed updates: faster, as accurate", late),
    Claim("others", "Beside PyTorch, ZeRO-2, Megatron and L2L", others),
    Claim("scaling", "Near-linear to 128 GPUs", scaling),
    Claim("lines", "A few lines, one flag", lines),
    Claim("lightning", "Beside Lightning", lightning),
]


def main():
    keys = [claim.key for claim in CLAIMS]
    for flag in [argument for argument in sys.argv[1:] if argument.startswith("--packages=")]:
        folder = os.path.join(os.environ.get("BUILD_WORKING_DIRECTORY", os.getcwd()), flag.removeprefix("--packages="))
        sys.path.append(folder)
        os.environ["PYTHONPATH"] = f"{os.environ.get('PYTHONPATH', '')}:{folder}"
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
        print(f"{claim.key}: {time.monotonic() - start:.0f} s", flush=True)
        sections[claim.title] = f"{text}\n\n{datetime.date.today()}, {report.machine()}."
        page.write_text(HEAD + "".join(f"\n## {claim.title}\n\n{sections[claim.title]}\n" for claim in CLAIMS
                                       if claim.title in sections))


if __name__ == "__main__":
    main()
