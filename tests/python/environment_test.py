"""The Python of these tests has the packages of the lock file, and the libtorch that the C++ programs load."""
import importlib
import importlib.metadata
import os
import pathlib
import platform
import re
import subprocess
import tempfile
import unittest

import safetensors.torch
import torch

LOCK = pathlib.Path(f"third_party/wheels_{platform.machine()}.txt")
PROGRAM = "tests/python/links_libtorch"


def locked_versions(group):
    return dict(re.findall(rf"^(\S+)==(\S+) .*# {group} ", LOCK.read_text(), re.M))


class EnvironmentTest(unittest.TestCase):

    def test_packages_have_the_versions_of_the_lock_file(self):
        expected = locked_versions("python") | locked_versions("arrow")
        self.assertIn("safetensors", expected)
        self.assertEqual({name: importlib.metadata.version(name) for name in expected}, expected)
        self.assertEqual(torch.__version__.split("+")[0], locked_versions("cpu")["torch"])

    def test_packages_of_the_host_are_out_of_reach(self):
        with self.assertRaises(ImportError):
            importlib.import_module("pip")  # bazelw makes sure that the host has it

    def test_torch_loads_the_library_that_programs_load(self):
        loaded = set(re.findall(r"/.*/libtorch_cpu\.so$", pathlib.Path("/proc/self/maps").read_text(), re.M))
        self.assertEqual(len(loaded), 1, loaded)
        listing = subprocess.check_output([PROGRAM], env={"LD_TRACE_LOADED_OBJECTS": "1"}, text=True)
        of_program = re.search(r"libtorch_cpu\.so => (\S.*) \(0x", listing)[1]
        self.assertTrue(os.path.samefile(of_program, loaded.pop()), of_program)

    def test_safetensors_brings_a_tensor_back(self):
        tensor = torch.arange(6, dtype=torch.bfloat16).view(2, 3)
        with tempfile.TemporaryDirectory() as folder:
            safetensors.torch.save_file({"x": tensor}, f"{folder}/x.safetensors")
            self.assertTrue(torch.equal(safetensors.torch.load_file(f"{folder}/x.safetensors")["x"], tensor))


if __name__ == "__main__":
    unittest.main()
