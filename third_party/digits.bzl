"""@digits: the UCI digits (1,797 images of 8x8), as scikit-learn ships them. `data = ["@digits//:digits.csv.gz"]`."""

load(":wheels.bzl", "ENVIRON", "install_wheels")

_FILE = "sklearn/datasets/data/digits.csv.gz"

def _digits_repository(ctx):
    # The file is the same in the wheel of every architecture.
    install_wheels(ctx, "digits-{rows}", ["digits"], "x86_64", only = _FILE)
    ctx.symlink("site-packages/" + _FILE, "digits.csv.gz")
    ctx.file("BUILD", 'exports_files(["digits.csv.gz"])\n', executable = False)

digits_repository = repository_rule(
    implementation = _digits_repository,
    environ = ENVIRON,
    local = True,
)
