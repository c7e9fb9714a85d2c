"""Late updates, after a warm-up, reach the validation loss of their base: the mean over three seeds within 1%."""
import pathlib
import statistics
import sys
import unittest

sys.path.insert(0, "bench")
import convergence

DATA = pathlib.Path("../digits/digits.csv.gz").absolute()
FLAGS = {
    "transformer_lm": ["--n_layer=2", "--n_head=2", "--n_embd=32", "--context=32", "--batch_size=16", "--max_epochs=8",
                       "--batches_per_epoch=50", "--lr=5e-3", "--sample.length=0"],
    "digits": [f"--data={DATA}", "--max_epochs=6", "--lr=1e-3"],
}


class LateUpdateTest(unittest.TestCase):

    def test_reaches_the_loss_of_its_base(self):
        for name, flags in FLAGS.items():
            with self.subTest(name):
                program = pathlib.Path("examples", name, name).absolute()
                found = {strategy: [convergence.best(program, convergence.METRICS[name],
                                                     [f"--strategy={strategy}", *settings, f"--seed={seed}", *flags])
                                    for seed in range(1, 4)]
                         for strategy, settings in convergence.STRATEGIES.items()}
                on_time, late = (statistics.mean(losses) for losses in found.values())
                self.assertNotEqual(on_time, late)  # updates were late
                self.assertLess(late, 1.01 * on_time, found)


if __name__ == "__main__":
    unittest.main()
