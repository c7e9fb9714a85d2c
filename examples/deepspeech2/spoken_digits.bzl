"""A folder of spoken digits, written by espeak-ng when the example is built."""

def _spoken_digits_impl(ctx):
    folder = ctx.actions.declare_directory(ctx.label.name)
    ctx.actions.run(
        executable = "/usr/bin/python3",
        arguments = [ctx.file._script.path, folder.path],
        inputs = [ctx.file._script],
        outputs = [folder],
        mnemonic = "SpokenDigits",
        progress_message = "Speaking digits",
        use_default_shell_env = True,
    )
    return [DefaultInfo(files = depset([folder]), runfiles = ctx.runfiles([folder]))]

spoken_digits = rule(
    implementation = _spoken_digits_impl,
    attrs = {"_script": attr.label(default = "spoken_digits.py", allow_single_file = True)},
)
