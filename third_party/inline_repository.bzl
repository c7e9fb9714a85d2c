"""A repository whose few small files are written out where it is declared."""

def _inline_repository(ctx):
    for path, text in ctx.attr.files.items():
        ctx.file(path, text, executable = False)

inline_repository = repository_rule(
    implementation = _inline_repository,
    attrs = {"files": attr.string_dict(mandatory = True)},
)
