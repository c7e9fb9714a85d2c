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
import zipfile

logging.disable(logging.WARNING)  # torch logs as it is imported

import safetensors.torch
import torch
from torch._export.converter import TS2EPConverter
from torch._export.serde.serialize import serialize
from torch.export.graph_signature import InputKind
from torch.utils import _pytree as pytree

from exported_program import UsageError, choose_instructions_quickly, entries_of, examples, exit_code_of, input_names, largest_difference, output_names, read_program, turn_to_eval

EXAMPLE = "example.pt"  # the entry of a TorchScript file that export_torchscript() has written
TOLERANCES = {".pt2": 1e-6, ".onnx": 1e-5, ".aoti.pt2": 1e-5}
# So that the weights of a package can be exchanged: by default Inductor writes small ones into the code.
INDUCTOR = {"always_keep_tensor_constants": True, "joint_graph_constant_folding": False}


def mark_parameters(program, parameters):
    """Makes parameters of the weights that are parameters in TorchScript: torch's converter makes a buffer of each."""
    for spec in program.graph_signature.input_specs:
        if spec.kind == InputKind.BUFFER and spec.target in parameters:
            spec.kind, spec.persistent = InputKind.PARAMETER, None
            weight = program.state_dict[spec.target].detach()
            program.state_dict[spec.target] = torch.nn.Parameter(weight, parameters[spec.target].requires_grad)


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
    mark_parameters(program, dict(module.named_parameters(remove_duplicate=False)))
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
    names = entries_of(file, "a .pt2 of torch.export.save() or a TorchScript file")
    if any(name.endswith("/constants.pkl") for name in names):
        return read_torchscript(file)
    if not any("/models/" in name for name in names):
        raise UsageError(f"{file} is neither a .pt2 of torch.export.save() nor a TorchScript file")
    return read_program(file), lambda inputs, folder: run_cpp(file, inputs, folder)


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
    with choose_instructions_quickly():
        torch._inductor.aoti_compile_and_package(program, package_path=str(file), inductor_configs=dict(INDUCTOR))
    with zipfile.ZipFile(file, "a") as archive:
        folder = archive.namelist()[0].split("/")[0]
        archive.writestr(f"{folder}/extra/program.json", serialize(program).exported_program)


WRITERS = {".pt2": write_program, ".onnx": write_onnx, ".aoti.pt2": write_compiled}


def run_cpp(file, inputs, folder):
    """What a Predictor answers."""
    folder = pathlib.Path(tempfile.mkdtemp(dir=folder))
    safetensors.torch.save_file({name: value.clone() for name, value in inputs.items()}, folder / "inputs")
    on_gpu = any(value.is_cuda for value in inputs.values())
    command = [os.environ["FULGUR_PREDICT"], str(file), str(folder / "inputs"), str(folder / "outputs"),
               *(["--device=cuda"] if on_gpu else [])]
    result = subprocess.run(command, capture_output=True, text=True, check=False)
    if result.returncode != 0:
        raise UsageError(f"C++ cannot run it: {result.stderr.strip()}")
    return safetensors.torch.load_file(folder / "outputs")


def run_onnx(file, inputs, _):
    import onnxruntime  # says something as it is imported
    onnxruntime.disable_telemetry_events()
    session = onnxruntime.InferenceSession(file, providers=["CPUExecutionProvider"])
    used = {item.name for item in session.get_inputs()}
    results = session.run(None, {name: value.cpu().numpy() for name, value in inputs.items() if name in used})
    return {item.name: torch.from_numpy(result) for item, result in zip(session.get_outputs(), results)}


def compare(expected, found, tolerance, size):
    """The largest difference, as a part of the output's largest value, or of 1 if all are smaller."""
    if sorted(expected) != sorted(found):
        raise UsageError(f"it has the outputs {', '.join(found)}, but those in C++ are {', '.join(expected)}")
    worst = 0.0
    for name, value in expected.items():
        other, value = found[name].cpu(), value.cpu()
        if value.shape != other.shape:
            raise UsageError(f"its output '{name}' for a batch of {size} has sizes {list(other.shape)}, but that in C++ has "
                             f"{list(value.shape)}")
        if value.dtype != other.dtype:
            raise UsageError(f"its output '{name}' is {other.dtype}, but that in C++ is {value.dtype}")
        if value.numel() == 0:
            continue
        difference = largest_difference(value, other, least=1.0)
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


def main(arguments=None):
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter,
                                     prog="export")
    parser.add_argument("source", type=pathlib.Path, help="a .pt2 of torch.export.save(), or a TorchScript file")
    parser.add_argument("target", type=pathlib.Path, help="a new file: .pt2, .onnx or .aoti.pt2")
    parser.add_argument("--tolerance", type=float, help="most that outputs may differ from those in C++; default: 1e-6 for "
                        ".pt2, otherwise 1e-5")
    arguments = parser.parse_args(arguments)
    return exit_code_of(lambda: export(arguments.source, arguments.target, arguments.tolerance), arguments.target)


if __name__ == "__main__":
    sys.exit(main())
