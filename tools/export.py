#!/usr/bin/python3
"""Makes of a trained model a file that other programs run.

  ./bazelw run //tools:export -- net.pt  net.pt2         TorchScript of export_torchscript() -> torch.export
  ./bazelw run //tools:export -- net.pt2 net.onnx        ONNX, for onnxruntime
  ./bazelw run //tools:export -- net.pt2 net.aoti.pt2    native code by AOTInductor, for a Predictor

The first file is a program of torch.export.save(), such as `//tools:ckpt -- convert` writes with the weights of a
checkpoint, or a TorchScript file. The model is exported in eval mode, with dynamic sizes as they are in the first file.
The result is run on the example inputs that the first file has, and on half of them if their number may vary, and
compared with what C++ computes; it is not written if an output differs by more than --tolerance of its largest value, or
of 1 if all are smaller. AOTInductor compiles for the processor of this machine and needs a C++ compiler.
"""
import argparse
import contextlib
import io
import logging
import os
import pathlib
import subprocess
import sys
import tempfile
import warnings
import zipfile

logging.disable(logging.WARNING)  # torch logs as it is imported

import safetensors.torch
import torch
from torch._export.converter import TS2EPConverter
from torch._export.serde.serialize import serialize
from torch.utils import _pytree as pytree

EXAMPLE = "example.pt"  # the entry of a TorchScript file that export_torchscript() has written
TOLERANCES = {".pt2": 1e-6, ".onnx": 1e-5, ".aoti.pt2": 1e-5}
# So that the weights of a package can be exchanged: by default Inductor writes small ones into the code.
INDUCTOR = {"always_keep_tensor_constants": True, "joint_graph_constant_folding": False}
USAGE_ERROR = 2


class UsageError(Exception):
    """A message for the user."""


def read_torchscript(file):
    """The program, and a function that answers as C++ does, with what is recorded of the example or by TorchScript, which
    export_torchscript() has compared with C++."""
    extra = {EXAMPLE: ""}
    module = torch.jit.load(file, _extra_files=extra)
    if not extra[EXAMPLE]:
        raise UsageError(f"{file} has no example inputs: write it by export_torchscript(), or export the model in Python "
                         "by torch.export")
    items = torch.load(io.BytesIO(extra[EXAMPLE]), weights_only=True)
    example = dict(zip(items[::2], items[1::2]))
    of = {kind: {name.removeprefix(f"{kind}/"): tensor for name, tensor in example.items() if name.startswith(f"{kind}/")}
          for kind in ("inputs", "outputs")}
    converter = TS2EPConverter(module.eval(), tuple(of["inputs"].values()))
    for value in converter.ts_graph.inputs():
        name = value.debugName().split(".")[0]  # TorchScript calls an input "x.1"
        if name in of["inputs"]:
            value.setDebugName(name)
    program = converter.convert()
    # TorchScript returns a tuple, or a tensor alone; the program returns a dict, as predict_step does.
    _, program.module_call_graph[0].signature.out_spec = pytree.tree_flatten(dict.fromkeys(of["outputs"], 0))

    def answer(inputs, _):
        is_example = all(value.equal(of["inputs"][name]) for name, value in inputs.items())
        if is_example:
            return of["outputs"]
        outputs = module(*inputs.values())
        return dict(zip(of["outputs"], [outputs] if isinstance(outputs, torch.Tensor) else outputs, strict=True))
    return program, answer


def read(file):
    """The program, and a function that answers a batch as C++ does, with a folder for its files."""
    try:
        with zipfile.ZipFile(file) as archive:
            names = archive.namelist()
    except (OSError, zipfile.BadZipFile) as error:
        raise UsageError(f"{file}: {error}; a .pt2 of torch.export.save() or a TorchScript file is needed") from error
    if any(name.endswith("/constants.pkl") for name in names):
        return read_torchscript(file)
    if not any("/models/" in name for name in names):
        raise UsageError(f"{file} is neither a .pt2 of torch.export.save() nor a TorchScript file")
    program = torch.export.load(file)
    if program.example_inputs is None:
        raise UsageError(f"{file} has no example inputs, which torch.export.save() keeps unless they are taken out")
    return program, lambda inputs, folder: run_cpp(file, inputs, folder)


def graphs_of(module):
    return [part.graph for part in module.modules() if isinstance(part, torch.fx.GraphModule)]


def turn_to_eval(program):
    """Turns dropout and batch norm over, as nn::Program does by Module::eval()."""
    counters = {name for name, buffer in program.graph_signature.inputs_to_buffers.items()
                if buffer.endswith("num_batches_tracked")}
    for graph in graphs_of(program.graph_module):
        for node in list(graph.nodes):
            schema = getattr(node.target, "_schema", None)
            if node.op != "call_function" or schema is None or node.target.namespace != "aten":
                continue
            names = [argument.name for argument in schema.arguments]
            if node.target is torch.ops.aten.add_.Tensor and getattr(node.args[0], "name", None) in counters:
                node.replace_all_uses_with(node.args[0])
                graph.erase_node(node)
                continue
            has_statistics = "running_mean" not in names or node.args[names.index("running_mean")] is not None
            for name, value in (("train", False), ("training", False), ("use_input_stats", False), ("dropout_p", 0.0)):
                if name not in names or not has_statistics:
                    continue
                if name in node.kwargs:
                    node.update_kwarg(name, value)
                elif names.index(name) < len(node.args):
                    node.update_arg(names.index(name), value)
        graph.lint()
    program.graph_module.recompile()


def names_of_leaves(tree):
    """'logits' in a dict, '0' in a tuple, 'past.1' deeper: as nn::Program calls them."""
    def name(path):
        return ".".join(str(getattr(key, "key", getattr(key, "idx", key))) for key in path)
    leaves, _ = pytree.tree_flatten_with_path(tree)
    return [name(path) for path, _ in leaves]


def input_names(program):
    args, kwargs = program.example_inputs
    signature = program.module_call_graph[0].signature
    own = list(getattr(signature, "forward_arg_names", None) or [])
    names = []
    for i, argument in enumerate(args):
        first = own[i] if i < len(own) else str(i)
        names += [".".join(filter(None, (first, rest))) for rest in names_of_leaves(argument)]
    return names + names_of_leaves(kwargs)


def output_names(program):
    spec = program.module_call_graph[0].signature.out_spec
    names = names_of_leaves(pytree.tree_unflatten([0] * spec.num_leaves, spec))
    return ["output"] if names == [""] else names


def examples(program):
    """Inputs by name: the example, and half of it if the first size of every input may be that."""
    values = pytree.tree_leaves(program.example_inputs)
    named = dict(zip(input_names(program), values, strict=True))
    whole = {name: value.contiguous() for name, value in named.items() if isinstance(value, torch.Tensor)}
    strangers = [name for name, value in named.items() if value is not None and not isinstance(value, torch.Tensor)]
    if strangers:
        raise UsageError(f"the program takes what is no tensor: {', '.join(strangers)}")
    tensors = [node.meta["val"] for node in program.graph.nodes
               if node.name in program.graph_signature.user_inputs and isinstance(node.meta.get("val"), torch.Tensor)]
    if not whole:
        raise UsageError("the program takes no tensor")
    sizes = {value.shape[:1] for value in whole.values()}
    half = sizes.pop().numel() // 2 if len(sizes) == 1 else 0

    def may_be_half(tensor):
        if tensor.dim() == 0 or not isinstance(tensor.shape[0], torch.SymInt):
            return False
        size = tensor.shape[0].node.expr
        limits = program.range_constraints.get(size)
        return size.is_Symbol and (limits is None or limits.lower <= half <= limits.upper)
    if half < 2 or not all(map(may_be_half, tensors)):
        return [whole]
    return [whole, {name: value[:half] for name, value in whole.items()}]


def write_program(program, file):
    torch.export.save(program, file)


def write_onnx(program, file):
    names = [name for name, output in zip(output_names(program), program.graph_signature.user_outputs) if output is not None]
    with contextlib.redirect_stdout(io.StringIO()):
        torch.onnx.export(program, dynamo=True, input_names=list(examples(program)[0]), output_names=names,
                          external_data=False).save(str(file))


def write_compiled(program, file):
    for name, value in zip(input_names(program), pytree.tree_leaves(program.example_inputs)):
        if isinstance(value, torch.Tensor) and not value.is_contiguous():
            raise UsageError(f"input '{name}' was exported with strides {value.stride()}: compiled code reads one layout "
                             "alone, which a Predictor makes contiguous; export the model with contiguous inputs")
    torch._inductor.aoti_compile_and_package(program, package_path=str(file), inductor_configs=dict(INDUCTOR))
    with zipfile.ZipFile(file, "a") as archive:
        folder = archive.namelist()[0].split("/")[0]
        archive.writestr(f"{folder}/extra/program.json", serialize(program).exported_program)


WRITERS = {".pt2": write_program, ".onnx": write_onnx, ".aoti.pt2": write_compiled}


def run_cpp(file, inputs, folder):
    """What a Predictor answers."""
    folder = pathlib.Path(tempfile.mkdtemp(dir=folder))
    safetensors.torch.save_file({name: value.clone() for name, value in inputs.items()}, folder / "inputs")
    command = [os.environ["FULGUR_PREDICT"], str(file), str(folder / "inputs"), str(folder / "outputs")]
    result = subprocess.run(command, capture_output=True, text=True, check=False)
    if result.returncode != 0:
        raise UsageError(f"C++ cannot run it: {result.stderr.strip()}")
    return safetensors.torch.load_file(folder / "outputs")


def run_onnx(file, inputs, _):
    import onnxruntime  # says something as it is imported
    onnxruntime.disable_telemetry_events()
    session = onnxruntime.InferenceSession(file, providers=["CPUExecutionProvider"])
    used = {item.name for item in session.get_inputs()}
    results = session.run(None, {name: value.numpy() for name, value in inputs.items() if name in used})
    return {item.name: torch.from_numpy(result) for item, result in zip(session.get_outputs(), results)}


def compare(expected, found, tolerance, size):
    """The largest difference, as a part of the output's largest value, or of 1 if all are smaller."""
    if sorted(expected) != sorted(found):
        raise UsageError(f"it has the outputs {', '.join(found)}, but those in C++ are {', '.join(expected)}")
    worst = 0.0
    for name, value in expected.items():
        other = found[name]
        if value.shape != other.shape:
            raise UsageError(f"its output '{name}' for a batch of {size} has sizes {list(other.shape)}, but that in C++ has "
                             f"{list(value.shape)}")
        if value.dtype != other.dtype:
            raise UsageError(f"its output '{name}' is {other.dtype}, but that in C++ is {value.dtype}")
        if value.numel() == 0:
            continue
        difference = (value.double() - other.double()).abs().max().item() / max(1.0, value.double().abs().max().item())
        if not difference <= tolerance:
            raise UsageError(f"its output '{name}' for a batch of {size} differs from that in C++ by {difference:.3g}, more "
                             f"than --tolerance={tolerance:g}")
        worst = max(worst, difference)
    return worst


def kind_of(file):
    for ending in sorted(WRITERS, key=len, reverse=True):
        if file.name.endswith(ending):
            return ending
    raise UsageError(f"'{file}': the name says the format; end it with .pt2 (torch.export), .onnx or .aoti.pt2 "
                     "(AOTInductor)")


def export(source, target, tolerance):
    kind = kind_of(target)
    tolerance = TOLERANCES[kind] if tolerance is None else tolerance
    if not target.absolute().parent.is_dir():
        raise UsageError(f"there is no folder {target.absolute().parent}")
    with tempfile.TemporaryDirectory(dir=target.absolute().parent) as name:
        folder = pathlib.Path(name)
        os.environ.setdefault("TORCHINDUCTOR_CACHE_DIR", str(folder / "inductor"))
        program, answer = read(source)
        batches = examples(program)
        expected = [answer(batch, folder) for batch in batches]
        turn_to_eval(program)
        made = folder / f"made{kind}"
        WRITERS[kind](program, made)
        run = run_onnx if kind == ".onnx" else run_cpp
        sizes = ["x".join(map(str, next(iter(batch.values())).shape[:1])) or "one" for batch in batches]
        worst = max(compare(values, run(made, batch, folder), tolerance, size)
                    for values, batch, size in zip(expected, batches, sizes))
        os.replace(made, target)
    print(f"{target}: as in C++ within {worst:.2g}, for batches of {' and '.join(sizes)}")


def exit_code_of(work, target):
    """Does the work of a tool that writes the file `target`, in the folder where its user is."""
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    os.chdir(os.environ.get("BUILD_WORKING_DIRECTORY", "."))
    try:
        work()
    except UsageError as error:
        print(f"error: {target} is not written: {error}", file=sys.stderr)
        return USAGE_ERROR
    return 0


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter,
                                     prog="export")
    parser.add_argument("source", type=pathlib.Path, help="a .pt2 of torch.export.save(), or a TorchScript file")
    parser.add_argument("target", type=pathlib.Path, help="a new file: .pt2, .onnx or .aoti.pt2")
    parser.add_argument("--tolerance", type=float, help="most that outputs may differ from those in C++; default: 1e-6 for "
                        ".pt2, otherwise 1e-5")
    arguments = parser.parse_args()
    return exit_code_of(lambda: export(arguments.source, arguments.target, arguments.tolerance), arguments.target)


if __name__ == "__main__":
    sys.exit(main())
