"""Runs wheels.py from a repository rule."""

ENVIRON = ["XDG_CACHE_HOME"]

_TIMEOUT_S = 7200  # a cold download on a slow line; Bazel's own limit would be 600 s

def install_wheels(ctx, into, groups, arch, only = []):
    """Installs wheels into the user's cache and links their folder as `site-packages` in the repository.

    Args:
      ctx: the repository rule's context.
      into: folder in the cache; `{rows}` in it stands for a digest of the rows.
      groups: groups of rows of the lock file.
      arch: x86_64 or aarch64; names the lock file.
      only: the files and folders to unpack, instead of all.
    """
    script = ctx.path(Label("//third_party:wheels.py"))
    lock = ctx.path(Label("//third_party:wheels_%s.txt" % arch))
    command = ["/usr/bin/python3", script, lock, "--into", into, "--arch", arch, "--link", "site-packages"]
    for part in only:
        command += ["--only", part]
    result = ctx.execute(command + groups, quiet = False, timeout = _TIMEOUT_S)
    if result.return_code != 0:
        fail("@%s: %s" % (ctx.name, result.stderr.strip().split("\n")[-1]))
