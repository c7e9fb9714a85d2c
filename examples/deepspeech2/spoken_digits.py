"""Writes spoken digits in the layout of LibriSpeech: <folder>/{train,val,test}/{*.wav,digits.trans.txt}.

The speaker is espeak-ng. Voices and speeds of val and test are not in train. The same version of espeak-ng writes the same
bytes each time.
"""
import os
import pathlib
import random
import subprocess
import sys
import tempfile

DIGITS = "zero one two three four five six seven eight nine".split()
ACCENTS = ["en-us", "en-gb", "en-gb-x-rp", "en-029"]
PARTS = {  # name: (utterances, variants of the voice, words per minute)
    "train": (500, "m1 m2 m3 m4 m5 m6 f1 f2 f3 f4 Alicia Andrea Andy Denis Gene Hugo Michael aunty belinda benjamin boris ed iven "
              "john klatt klatt3 linda max paul quincy rob steph travis zac".split(), [120, 140, 160, 180, 200]),
    "val": (60, "m7 f5 Diogo anika".split(), [150]),
    "test": (60, "m8 Annie Mario shelby victor".split(), [170]),
}


def write_part(folder, num_utterances, voices, speeds):
    folder.mkdir(parents=True)
    draw = random.Random(folder.name)
    lines = []
    for i in range(num_utterances):
        words = " ".join(draw.choices(DIGITS, k=draw.randint(1, 4)))
        voice, speed, pitch = f"{draw.choice(ACCENTS)}+{draw.choice(voices)}", draw.choice(speeds), draw.randint(30, 70)
        name = f"{folder.name}-{i:03}"
        subprocess.run(["espeak-ng", "-v", voice, "-s", str(speed), "-p", str(pitch), "-w", folder / f"{name}.wav", words],
                       check=True)
        lines.append(f"{name} {words}\n")
    (folder / "digits.trans.txt").write_text("".join(lines))


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as settings:
        os.environ["XDG_CONFIG_HOME"] = settings  # PulseAudio's library, which espeak-ng starts, wants to write there
        for part, (num_utterances, voices, speeds) in PARTS.items():
            write_part(pathlib.Path(sys.argv[1], part), num_utterances, voices, speeds)
