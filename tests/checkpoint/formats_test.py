"""Files of checkpoint/ and those of the real packages: each reads what the other has written."""
import collections
import os
import pathlib
import subprocess
import tempfile
import unittest
import warnings

import lightning
import safetensors
import safetensors.torch
import torch

PROGRAM = "tests/checkpoint/formats_program"
STORAGE_DTYPES = (torch.bool, torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64, torch.float16,
                  torch.bfloat16, torch.float32, torch.float64, torch.complex64)
OTHER_DTYPES = (torch.uint16, torch.uint32, torch.uint64, torch.float8_e4m3fn, torch.float8_e5m2)


def tensors(dtypes):
    torch.manual_seed(0)
    odd = {"scalar": torch.tensor(3.5), "empty": torch.zeros(0, 3), "é/\"quoted\"\n": torch.arange(6).view(1, 2, 3)}
    return {str(dtype): (torch.rand(2, 3) * 8).to(dtype) for dtype in dtypes} | odd


class Tiny(lightning.LightningModule):

    def __init__(self, width, lr, name, bias):
        super().__init__()
        self.save_hyperparameters()
        self.layer = torch.nn.Linear(2, width, bias=bias)
        self.steps = []

    def training_step(self, batch, batch_idx):
        self.steps.append((self.current_epoch, self.global_step))
        return self.layer(batch).sum()

    def validation_step(self, batch, batch_idx):
        pass

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.0)


class FormatsTest(unittest.TestCase):

    def setUp(self):
        self.folder = self.enterContext(tempfile.TemporaryDirectory())

    def path(self, name):
        return os.path.join(self.folder, name)

    def convert(self, what, source, target):
        subprocess.run([PROGRAM, what, self.path(source), self.path(target)], check=True, stdout=subprocess.DEVNULL)
        return self.path(target)

    def refusal(self, what, source):
        result = subprocess.run([PROGRAM, what, self.path(source), self.path("none")], stderr=subprocess.PIPE, text=True)
        self.assertEqual(result.returncode, 3, result.stderr)
        return result.stderr

    def assert_same(self, found, expected):
        self.assertEqual(set(found), set(expected))
        for name, tensor in expected.items():
            self.assertEqual((found[name].dtype, found[name].shape), (tensor.dtype, tensor.shape), name)
            self.assertEqual(found[name].contiguous().view(-1).view(torch.uint8).tolist() if tensor.numel() else [],
                             tensor.contiguous().view(-1).view(torch.uint8).tolist() if tensor.numel() else [], name)

    def test_safetensors_there_and_back(self):
        expected = tensors(STORAGE_DTYPES + OTHER_DTYPES)
        safetensors.torch.save_file(expected, self.path("a"), metadata={"format": "pt"})
        written = self.convert("safetensors", "a", "b")
        self.assert_same(safetensors.torch.load_file(written), expected)
        with safetensors.safe_open(written, "pt") as file:
            self.assertEqual(file.metadata(), {"format": "pt"})

    def test_safetensors_reads_our_weights_into_an_equal_module(self):
        module = torch.nn.Sequential(torch.nn.Linear(2, 3), torch.nn.BatchNorm1d(3))
        safetensors.torch.save_file(module.state_dict(), self.path("a"))
        other = torch.nn.Sequential(torch.nn.Linear(2, 3), torch.nn.BatchNorm1d(3))
        other.load_state_dict(safetensors.torch.load_file(self.convert("safetensors", "a", "b")))
        self.assert_same(other.state_dict(), module.state_dict())

    def test_torch_load_reads_our_state_dict_by_default(self):
        expected = tensors(STORAGE_DTYPES)
        safetensors.torch.save_file(expected, self.path("a"))
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            found = torch.load(self.convert("torch", "a", "m.pt"))
            mapped = torch.load(self.path("m.pt"), mmap=True)
        self.assert_same(found, expected)
        self.assert_same(mapped, expected)

    def test_we_read_state_dicts_of_torch_save(self):
        module = torch.nn.Sequential(torch.nn.Linear(2, 3), torch.nn.BatchNorm1d(3))
        shared = torch.arange(12.0).view(3, 4)
        cases = {
            "ordered_dict": module.state_dict(),  # with _metadata
            "dict": tensors(STORAGE_DTYPES),
            "parameters": dict(module.named_parameters()),
            "views": {"all": shared, "row": shared[1], "transposed": shared.t(), "tied": shared},
            "pairs": collections.OrderedDict([("a", shared)]),
            "lazy": {"conj": torch.tensor([1 + 2j, 3 - 4j]).conj(), "neg": torch.tensor([1 + 2j, 3 - 4j]).conj().imag},
            "empty": {},
        }
        for name, state_dict in cases.items():
            with self.subTest(name):
                torch.save(state_dict, self.path(name))
                written = self.convert("torch_to_safetensors", name, name + ".safetensors")
                self.assert_same(safetensors.torch.load_file(written),
                                 {k: v.detach().resolve_conj().resolve_neg() for k, v in state_dict.items()})

    def test_we_read_every_pickle_protocol(self):
        for protocol in (2, 3, 4, 5):
            torch.save({"w": torch.arange(3)}, self.path(f"{protocol}"), pickle_protocol=protocol)
            written = self.convert("torch_to_safetensors", f"{protocol}", f"{protocol}.safetensors")
            self.assert_same(safetensors.torch.load_file(written), {"w": torch.arange(3)})

    def test_we_say_what_we_do_not_read(self):
        torch.save({"w": torch.zeros(1)}, self.path("legacy"), _use_new_zipfile_serialization=False)
        self.assertIn("legacy: ", self.refusal("torch_to_safetensors", "legacy"))
        torch.save(torch.zeros(1), self.path("tensor"))
        self.assertIn("no dict of tensors by name", self.refusal("torch_to_safetensors", "tensor"))
        torch.save({"w": pathlib.PurePosixPath("x")}, self.path("object"))
        self.assertIn("'w' in the state dict is no tensor", self.refusal("torch_to_safetensors", "object"))
        torch.save({"w": torch.zeros(1, dtype=torch.uint16)}, self.path("uint16"))
        self.assertIn("'w' in the state dict is no tensor but 'torch._utils _rebuild_tensor_v3'",
                      self.refusal("torch_to_safetensors", "uint16"))
        torch.jit.save(torch.jit.script(torch.nn.Linear(1, 1)), self.path("script"))
        self.assertIn("TorchScript", self.refusal("torch_to_safetensors", "script"))

    def lightning_checkpoint(self):
        module = Tiny(3, 0.125, "tiny é", True)
        safetensors.torch.save_file(module.state_dict(), self.path("a"))
        return module, self.convert("lightning", "a", "m.ckpt")

    def trainer(self, **options):
        return lightning.Trainer(accelerator="cpu", logger=False, enable_checkpointing=False, enable_progress_bar=False,
                                 enable_model_summary=False, default_root_dir=self.folder, **options)

    def loader(self):
        return torch.utils.data.DataLoader(torch.ones(5, 2))

    def test_lightning_loads_our_module_with_its_hyper_parameters(self):
        module, path = self.lightning_checkpoint()
        loaded = Tiny.load_from_checkpoint(path)
        self.assertEqual(dict(loaded.hparams), {"width": 3, "lr": 0.125, "name": "tiny é", "bias": True})
        self.assert_same(loaded.state_dict(), module.state_dict())

    def test_lightning_goes_on_from_our_checkpoint(self):
        module, path = self.lightning_checkpoint()
        for weights_only in (None, True):
            resumed = Tiny(3, 0.125, "tiny é", True)
            trainer = self.trainer(max_epochs=4)
            trainer.fit(resumed, self.loader(), ckpt_path=path, weights_only=weights_only)
            self.assertEqual(resumed.steps, [(2, s) for s in range(8, 13)] + [(3, s) for s in range(13, 18)])
            self.assertEqual((trainer.current_epoch, trainer.global_step), (4, 18))
            self.assert_same(resumed.state_dict(), module.state_dict())  # lr is 0

    def test_lightning_validates_our_checkpoint(self):
        module, path = self.lightning_checkpoint()
        validated = Tiny(3, 0.125, "tiny é", True)
        self.trainer().validate(validated, self.loader(), ckpt_path=path)
        self.assert_same(validated.state_dict(), module.state_dict())

    def test_we_read_the_weights_of_a_lightning_checkpoint(self):
        module = Tiny(3, 0.125, "x", True)
        trainer = self.trainer(max_epochs=1)
        trainer.fit(module, self.loader())
        trainer.save_checkpoint(self.path("m.ckpt"))
        written = self.convert("torch_to_safetensors", "m.ckpt", "b")
        self.assert_same(safetensors.torch.load_file(written), module.state_dict())


if __name__ == "__main__":
    unittest.main()
