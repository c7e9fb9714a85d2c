"""Models as people write them in Python, small, for the tests of programs."""
import torch
from torch import nn
from torch.nn import functional


class Recurrent(nn.Module):

    def __init__(self, kind):
        super().__init__()
        self.embedding = nn.Embedding(50, 16)
        self.layers = getattr(nn, kind)(16, 24, num_layers=2, dropout=0.1, batch_first=True, bidirectional=True)
        self.head = nn.Linear(48, 5)

    def forward(self, tokens):
        states, _ = self.layers(self.embedding(tokens))
        return self.head(states[:, -1])


class Bert(nn.Module):

    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(50, 32)
        layer = nn.TransformerEncoderLayer(32, 4, 64, 0.1, batch_first=True)
        self.encoder = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.head = nn.Linear(32, 3)

    def forward(self, input_ids, attention_mask):
        hidden = self.encoder(self.embedding(input_ids), src_key_padding_mask=attention_mask == 0)
        return self.head(hidden[:, 0])


class Block(nn.Module):

    def __init__(self, width, num_heads):
        super().__init__()
        self.num_heads = num_heads
        self.l1, self.qkv, self.out = nn.LayerNorm(width), nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.l2, self.up, self.down = nn.LayerNorm(width), nn.Linear(width, 4 * width), nn.Linear(4 * width, width)
        self.dropout = nn.Dropout(0.1)

    def forward(self, x):
        batch_size, length, width = x.shape
        qkv = self.qkv(self.l1(x)).view(batch_size, length, 3, self.num_heads, width // self.num_heads)
        query, key, value = qkv.permute(2, 0, 3, 1, 4).unbind(0)
        attended = functional.scaled_dot_product_attention(query, key, value, is_causal=True,
                                                           dropout_p=self.dropout.p if self.training else 0.0)
        x = x + self.dropout(self.out(attended.transpose(1, 2).reshape(batch_size, length, width)))
        return x + self.dropout(self.down(functional.gelu(self.up(self.l2(x)))))


class Gpt(nn.Module):

    def __init__(self, vocabulary=64, width=32, num_layers=2, num_heads=4, context=16):
        super().__init__()
        self.wte, self.wpe = nn.Embedding(vocabulary, width), nn.Embedding(context, width)
        self.h = nn.ModuleList([Block(width, num_heads) for _ in range(num_layers)])
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, vocabulary, bias=False)
        self.head.weight = self.wte.weight
        self.dropout = nn.Dropout(0.1)

    def forward(self, tokens):
        positions = torch.arange(tokens.shape[1], device=tokens.device)
        x = self.dropout(self.wte(tokens) + self.wpe(positions))
        for block in self.h:
            x = block(x)
        return {"logits": self.head(self.norm(x))}


class Mlp(nn.Module):

    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(10, 32), nn.ReLU(), nn.Dropout(0.2), nn.Linear(32, 32), nn.Tanh(),
                                    nn.Dropout(0.1), nn.Linear(32, 2))

    def forward(self, x):
        return self.layers(x)


class Cnn(nn.Module):

    def __init__(self):
        super().__init__()
        self.features = nn.Sequential(
            nn.Conv2d(3, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU(inplace=True), nn.MaxPool2d(2), nn.Dropout2d(0.1),
            nn.Conv2d(8, 16, 3, stride=2, bias=False), nn.BatchNorm2d(16), nn.SiLU(), nn.AdaptiveAvgPool2d(1))
        self.classifier = nn.Sequential(nn.Flatten(), nn.Dropout(0.2), nn.Linear(16, 4))

    def forward(self, x):
        return self.classifier(self.features(x))


class Recursive(nn.Module):
    """One layer, called three times."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Sequential(nn.Linear(10, 10), nn.Tanh(), nn.Dropout(0.1))
        self.head = nn.Linear(10, 2)

    def forward(self, x):
        for _ in range(3):
            x = self.layer(x)
        return self.head(x)


class Norms(nn.Module):
    """A batch norm that is called twice, one under two names, and instance norms with and without running statistics."""

    def __init__(self):
        super().__init__()
        self.first = nn.Conv2d(3, 8, 3)
        self.twice = nn.BatchNorm2d(8)
        self.shared = nn.BatchNorm2d(8)
        self.again = self.shared
        self.plain = nn.InstanceNorm2d(8)
        self.tracking = nn.InstanceNorm2d(8, affine=True, track_running_stats=True)
        self.drop = nn.Dropout(0.1)
        self.head = nn.Linear(8, 4)

    def forward(self, x):
        x = self.twice(self.twice(self.first(x)).relu())
        x = self.plain(self.again(self.shared(x)).tanh()) + self.tracking(x)
        return self.head(self.drop(x.square().mean((2, 3))))
