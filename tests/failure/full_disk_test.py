"""A disk that is full in the middle of a run: a file system of 320 KiB, on which each step's checkpoint stays."""
import pathlib
import subprocess
import unittest

PROGRAM = pathlib.Path("tests/failure/resume_program").absolute()
CKPT = pathlib.Path("tools/ckpt").absolute()

# $1: the program, $2: tools/ckpt, further arguments: flags. Prints sections that begin with "== ".
SCRIPT = r"""
program=$1; ckpt=$2; shift 2
disk=$(mktemp -d)
mount -t tmpfs -o size=320k none "$disk"
train() { "$program" "$@" --accelerator=cpu --max_epochs=2 --step_ms=0 --default_root_dir="$disk" --name=run 2>&1; }
echo "== full"
train "$@" --keep=-1; echo "exit code $?"
echo "== left"
find "$disk" -name '.fulgur-tmp-*'
echo "== kept"
for folder in "$disk"/runs/run/checkpoints/epoch=*; do "$ckpt" verify "$folder" || echo "broken: $folder"; done
rm -r $(ls -d "$disk"/runs/run/checkpoints/epoch=* | sort -V | head -n 4)
echo "== resumed"
train "$@" --keep=1 --ckpt_path=last; echo "exit code $?"
umount "$disk"; rmdir "$disk"
echo "== undisturbed"
disk=$(mktemp -d)
train "$@" --keep=1; rm -r "$disk"
"""


def in_own_mounts(*command):
    return ["unshare", "--user", "--map-root-user", "--mount", *command]


def why_no_mounts():
    """Returns None if this process may mount file systems of its own, otherwise the reason."""
    try:
        tried = subprocess.run(in_own_mounts("mount", "-t", "tmpfs", "none", "/mnt"), capture_output=True, text=True)
    except FileNotFoundError as error:
        return str(error)
    return None if tried.returncode == 0 else tried.stderr.strip()


def result_of(output):
    return [line for line in output.splitlines() if line.startswith("steps ")]


WHY_NO_MOUNTS = why_no_mounts()


class FullDiskTest(unittest.TestCase):

    @unittest.skipIf(WHY_NO_MOUNTS, f"no file system can be mounted here: {WHY_NO_MOUNTS}")
    def test_what_was_saved_before_stays_and_goes_on(self):
        for flags in (["--strategy=single_device"], ["--strategy=ddp_sharded", "--devices=2"], ["--async=true"]):
            with self.subTest(flags=flags):
                done = subprocess.run(in_own_mounts("sh", "-c", SCRIPT, "sh", PROGRAM, CKPT, *flags),
                                      capture_output=True, text=True, timeout=200)
                sections = dict(part.split("\n", 1) for part in done.stdout.split("== ")[1:])
                self.assertIn("No space left on device", sections["full"], done.stderr)
                self.assertIn("exit code 1\n", sections["full"])
                self.assertEqual(sections["left"], "")
                self.assertNotIn("broken", sections["kept"])
                self.assertGreater(sections["kept"].count("\n"), 4)
                self.assertIn("exit code 0\n", sections["resumed"])
                self.assertEqual(result_of(sections["resumed"]), result_of(sections["undisturbed"]))
                self.assertEqual(len(result_of(sections["resumed"])), 1)


if __name__ == "__main__":
    unittest.main()
