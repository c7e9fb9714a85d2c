"""A model of Python, exported, trained in C++, and back in Python with the trained weights."""
import pathlib
import tempfile
import unittest

import safetensors.torch
import torch

import round_trip


class RoundTripTest(unittest.TestCase):

    @classmethod
    def setUpClass(cls):
        torch.set_num_threads(1)
        torch.manual_seed(0)
        cls.folder = pathlib.Path(cls.enterClassContext(tempfile.TemporaryDirectory()))
        cls.net = round_trip.Net().eval()  # as a model is that someone wants to use; C++ turns dropout and batch norm on
        round_trip.save_program(cls.net, cls.folder / "net.pt2")
        cls.checkpoint = round_trip.train(cls.folder / "net.pt2", cls.folder)
        cls.expected = safetensors.torch.load_file(cls.folder / "expected.safetensors")

    def test_python_computes_what_cpp_computes(self):
        trained = self.folder / "trained.pt2"
        result = round_trip.convert(self.checkpoint, trained, f"--program={self.folder / 'net.pt2'}")
        self.assertEqual(result.returncode, 0, result.stderr)
        module = torch.export.load(trained).module()
        y = module(self.expected["x"])["y"]
        self.assertLessEqual((y - self.expected["y"]).abs().max().item(), 1e-6)
        self.assertGreater((y - self.net(self.expected["x"])["y"]).abs().max().item(), 1e-3)  # it has been trained
        weights = module.state_dict()
        self.assertTrue(weights["embed.weight"].equal(weights["again.weight"]))
        self.assertEqual(weights["norm.num_batches_tracked"].item(), 18)

    def test_the_weights_fit_the_model_they_came_from(self):
        y = round_trip.eager(self.checkpoint, self.folder / "weights.pt")(self.expected["x"])["y"]
        self.assertLessEqual((y - self.expected["y"]).abs().max().item(), 1e-6)

    def test_the_program_must_be_given_and_fit(self):
        result = round_trip.convert(self.checkpoint, self.folder / "other.pt2")
        self.assertEqual(result.returncode, 2)
        self.assertIn("give the archive that the weights belong to", result.stderr)
        other = torch.export.export(torch.nn.Linear(4, 2), (torch.randn(3, 4),), strict=False)
        torch.export.save(other, self.folder / "linear.pt2")
        result = round_trip.convert(self.checkpoint, self.folder / "other.pt2", f"--program={self.folder / 'linear.pt2'}")
        self.assertEqual(result.returncode, 2)
        self.assertIn("does not have the weights", result.stderr)
        self.assertFalse((self.folder / "other.pt2").exists())


if __name__ == "__main__":
    unittest.main()
