"""examples/bert_classifier against Python: its tokens are those of PyPI's tokenizers, its hidden states those of torch."""
import json
import pathlib
import random
import subprocess
import tempfile
import unicodedata
import unittest

import safetensors.torch
import tokenizers
import torch
from torch import nn

ORACLE = pathlib.Path("tests/examples/bert_oracle").absolute()
WEIGHTS = pathlib.Path("../minilm").absolute()
LICENSES = pathlib.Path("/usr/share/common-licenses")
NUM_LINES = 5000


def real_lines():
    """Lines of the licences, as they are and as words in another order."""
    lines = sorted({line for file in LICENSES.iterdir() for line in file.read_text(encoding="utf-8").split("\n")})
    words = sorted({word for line in lines for word in line.split()})
    draw = random.Random(0)
    while len(lines) < NUM_LINES:
        lines.append(" ".join(draw.choices(words, k=12)))
    return draw.sample(lines, NUM_LINES)


def lines_of_characters():
    """Letters, signs and marks whose category is the same in all versions of Unicode."""
    draw = random.Random(1)
    ranges = [range(0x20, 0x3000), range(0x3000, 0xD800), range(0xF900, 0xFB00), range(0x1F300, 0x1F700), range(0x20000, 0x2A6D7)]
    characters = [character for character in map(chr, [point for block in ranges for point in draw.sample(block, min(len(block), 4000))])
                  if unicodedata.category(character)[0] in "LMNPSZ" and
                  unicodedata.category(character) == unicodedata.ucd_3_2_0.category(character)]
    return ["".join(draw.choices(characters, k=20)) for _ in range(500)]


def torch_encoder(config, weights):
    """An encoder of torch's own layers with the weights of a BERT."""
    layers = []
    for i in range(config["num_hidden_layers"]):
        layer = nn.TransformerEncoderLayer(config["hidden_size"], config["num_attention_heads"],
                                           config["intermediate_size"], dropout=0.0, activation="gelu",
                                           layer_norm_eps=config["layer_norm_eps"], batch_first=True)
        own = {name.removeprefix(f"encoder.layer.{i}."): value for name, value in weights.items()
               if name.startswith(f"encoder.layer.{i}.")}
        state = {f"self_attn.in_proj_{kind}": torch.cat([own[f"attention.self.{part}.{kind}"]
                                                         for part in ("query", "key", "value")])
                 for kind in ("weight", "bias")}
        for theirs, ours in (("self_attn.out_proj", "attention.output.dense"), ("linear1", "intermediate.dense"),
                             ("linear2", "output.dense"), ("norm1", "attention.output.LayerNorm"),
                             ("norm2", "output.LayerNorm")):
            state |= {f"{theirs}.{kind}": own[f"{ours}.{kind}"] for kind in ("weight", "bias")}
        layer.load_state_dict(state)
        layers.append(layer)
    return layers


class BertPythonTest(unittest.TestCase):

    def setUp(self):
        self.folder = pathlib.Path(self.enterContext(tempfile.TemporaryDirectory()))

    def test_tokens_are_those_of_tokenizers(self):
        lines = real_lines() + lines_of_characters() + ["", "word " * 600]
        (self.folder / "lines").write_text("".join(line + "\n" for line in lines), encoding="utf-8")
        said = subprocess.run([ORACLE, "tokens", WEIGHTS / "vocab.txt", self.folder / "lines"], check=True,
                              capture_output=True, text=True).stdout
        theirs = tokenizers.BertWordPieceTokenizer(str(WEIGHTS / "vocab.txt"), lowercase=True)
        theirs.enable_truncation(512)
        ours = [[int(number) for number in line.split()] for line in said.splitlines()]
        self.assertEqual(len(ours), len(lines))
        for line, tokens in zip(lines, ours):
            self.assertEqual(tokens, theirs.encode(line).ids, msg=line)
        self.assertEqual(len(ours[-1]), 512)

    def test_hidden_states_are_those_of_torch_encoder_layers(self):
        config = json.loads((WEIGHTS / "config.json").read_text())
        for eps in (config["layer_norm_eps"], 1e-2):
            with self.subTest(eps=eps):
                model = self.folder / str(eps)
                model.mkdir()
                (model / "model.safetensors").symlink_to(WEIGHTS / "model.safetensors")
                (model / "config.json").write_text(json.dumps(config | {"layer_norm_eps": eps}))
                self.compare_hidden_states(model)

    @torch.no_grad()
    def compare_hidden_states(self, model):
        config = json.loads((model / "config.json").read_text())
        weights = safetensors.torch.load_file(WEIGHTS / "model.safetensors")
        torch.manual_seed(0)
        ids = torch.randint(1000, config["vocab_size"], (4, 40))
        mask = torch.ones_like(ids)
        mask[1, 30:] = mask[2, 5:] = 0
        safetensors.torch.save_file({"input_ids": ids, "attention_mask": mask}, model / "in")
        subprocess.run([ORACLE, "hidden", model, model / "in", model / "out"], check=True)
        ours = safetensors.torch.load_file(model / "out")

        hidden = (weights["embeddings.word_embeddings.weight"][ids] +
                  weights["embeddings.position_embeddings.weight"][:ids.size(1)] +
                  weights["embeddings.token_type_embeddings.weight"][0])
        hidden = nn.functional.layer_norm(hidden, hidden.shape[-1:], weights["embeddings.LayerNorm.weight"],
                                          weights["embeddings.LayerNorm.bias"], config["layer_norm_eps"])
        for layer in torch_encoder(config, weights):
            hidden = layer(hidden, src_key_padding_mask=mask == 0)
        pooled = torch.tanh(hidden[:, 0] @ weights["pooler.dense.weight"].T + weights["pooler.dense.bias"])

        read = mask == 1
        self.assertGreater(hidden[read].std(), 0.1)
        torch.testing.assert_close(ours["hidden"][read], hidden[read], rtol=1e-5, atol=1e-5)
        torch.testing.assert_close(ours["pooled"], pooled, rtol=1e-5, atol=1e-5)


if __name__ == "__main__":
    unittest.main()
