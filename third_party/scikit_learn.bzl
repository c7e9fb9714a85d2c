"""Data sets that scikit-learn ships, each one file of its wheel.

@digits: the UCI digits, 1,797 images of 8x8. `data = ["@digits//:digits.csv.gz"]`.
@wines: the UCI wines, 178 wines of three growers by 13 measurements. `data = ["@wines//:wine_data.csv"]`.
"""

load(":wheels.bzl", "ENVIRON", "install_wheels")

_FOLDER = "sklearn/datasets/data/"

def _data_file_repository(ctx, name, file):
    # The file is the same in the wheel of every architecture.
    install_wheels(ctx, name + "-{rows}", ["scikit_learn"], "x86_64", only = [_FOLDER + file])
    ctx.symlink("site-packages/" + _FOLDER + file, file)
    ctx.file("BUILD", 'exports_files(["%s"])\n' % file, executable = False)

def _digits_repository(ctx):
    _data_file_repository(ctx, "digits", "digits.csv.gz")

def _wines_repository(ctx):
    _data_file_repository(ctx, "wines", "wine_data.csv")

digits_repository = repository_rule(
    implementation = _digits_repository,
    environ = ENVIRON,
    local = True,
)

wines_repository = repository_rule(
    implementation = _wines_repository,
    environ = ENVIRON,
    local = True,
)
