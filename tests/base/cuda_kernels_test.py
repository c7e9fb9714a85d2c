"""What ptxas says of every kernel of fulgur: its registers, and that none of its numbers lie in memory for want of them."""
import pathlib
import re
import unittest

KERNELS = {
    "optim/update_kernels.ptxas": {f"fulgur_update_{rule}" for rule in ("adam", "sgd", "adagrad", "rmsprop", "lion")},
    "core/norm_kernels.ptxas": {"fulgur_norm", "fulgur_clip"},
}
GENERATIONS = {"sm_80", "sm_90", "sm_100"}
MOST_REGISTERS = 80  # of a thread: three blocks of 256 threads fit into a multiprocessor
KERNEL = re.compile(r"Compiling entry function '(\w+)' for '(\w+)'\n.*\n *(\d+) bytes stack frame, (\d+) bytes spill stores, "
                    r"(\d+) bytes spill loads\n.*Used (\d+) registers")


class CudaKernelsTest(unittest.TestCase):

    def test_every_kernel_keeps_its_numbers_in_registers(self):
        for path, names in KERNELS.items():
            listing = pathlib.Path(path).read_text()
            if not listing:
                self.skipTest("this fulgur is built without kernels for GPUs")
            found = {(name, generation): tuple(map(int, figures)) for name, generation, *figures in KERNEL.findall(listing)}
            self.assertEqual(set(found), {(name, generation) for name in names for generation in GENERATIONS}, listing)
            for kernel, (stack, stores, loads, registers) in found.items():
                with self.subTest(kernel):
                    self.assertEqual((stack, stores, loads), (0, 0, 0))
                    self.assertLessEqual(registers, MOST_REGISTERS)


if __name__ == "__main__":
    unittest.main()
