"""Pictures as Pillow decodes and torchvision transforms them."""
import base64
import io
import os
import random
import struct
import subprocess
import tempfile
import unittest
import zlib

import numpy as np
import safetensors.torch
import torch
import torchvision
from PIL import Image, ImageOps
from torchvision.transforms import v2

PROGRAM = "tests/data/images_program"
MEAN, STD = [0.485, 0.456, 0.406], [0.229, 0.224, 0.225]
GRAY, RGB, PALETTE, GRAY_ALPHA, RGB_ALPHA = 0, 2, 3, 4, 6  # PNG's colour types
CHANNELS = {GRAY: 1, RGB: 3, PALETTE: 1, GRAY_ALPHA: 2, RGB_ALPHA: 4}

ARITHMETIC_JPEG = ("/9j/4AAQSkZJRgABAQAAAQABAAD/2wBDAAgGBgcGBQgHBwcJCQgKDBQNDAsLDBkSEw8UHRofHh0aHBwgJC4nICIsIxwcKDcpLDAxNDQ0"
                   "Hyc5PTgyPC4zNDL/yQALCAgACAABAREA/8wABgAQEAX/2gAIAQEAAD8A0qSBTHX/2Q==")


def photograph(height, width, channels=3):
    """Smooth, with edges and some noise, as uint8 [height, width, channels]."""
    y, x = np.mgrid[:height, :width] / 20
    waves = [np.sin(x + c) * np.cos(y * (c + 1) / 2) + (np.sin(3 * x * (c + 1)) > 0.8) for c in range(channels)]
    noise = np.random.default_rng(0).normal(0, 4, (height, width, channels))
    return np.clip(np.stack(waves, -1) * 60 + 110 + noise, 0, 255).astype(np.uint8)


def chunk(kind, data):
    return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))


def png(width, height, depth, color_type, interlaced=False, extra=b"", seed=0):
    """A PNG file of random samples, which no program but this one has written: every kind that the format has."""
    bits = np.random.default_rng(seed).integers(0, 2, (height, width, CHANNELS[color_type] * depth), dtype=np.uint8)
    passes = [(0, 0, 1, 1)]
    if interlaced:  # Adam7: first column, first row, steps
        passes = [(0, 0, 8, 8), (4, 0, 8, 8), (0, 4, 4, 8), (2, 0, 4, 4), (0, 2, 2, 4), (1, 0, 2, 2), (0, 1, 1, 2)]
    rows = b""
    for left, top, step_x, step_y in passes:
        for row in bits[top::step_y, left::step_x]:
            if row.size:
                rows += b"\0" + np.packbits(row.reshape(-1)).tobytes()
    palette = chunk(b"PLTE", np.random.default_rng(1).integers(0, 256, 3 << depth, dtype=np.uint8).tobytes())
    header = struct.pack(">IIBBBBB", width, height, depth, color_type, 0, 0, interlaced)
    return (b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", header) + (palette if color_type == PALETTE else b"") + extra
            + chunk(b"IDAT", zlib.compress(rows)) + chunk(b"IEND", b""))


def encoded(image, format_, **options):
    buffer = io.BytesIO()
    (image if isinstance(image, Image.Image) else Image.fromarray(image)).save(buffer, format_, **options)
    return buffer.getvalue()


class ImagesTest(unittest.TestCase):

    def setUp(self):
        self.folder = self.enterContext(tempfile.TemporaryDirectory())

    def path(self, name):
        return os.path.join(self.folder, name)

    def run_jobs(self, jobs):
        """Runs (job, bytes of a picture) and yields for each the tensors, or the message of the refusal."""
        lines = []
        for i, (job, picture) in enumerate(jobs):
            with open(self.path(f"{i}"), "wb") as file:
                file.write(picture)
            for old in (self.path(f"{i}.out"), self.path(f"{i}.out.error")):
                if os.path.exists(old):
                    os.remove(old)
            lines.append(f"{job} {self.path(str(i))} {self.path(f'{i}.out')}\n")
        subprocess.run([PROGRAM], input="".join(lines), text=True, check=True)
        for i in range(len(jobs)):
            if os.path.exists(self.path(f"{i}.out.error")):
                with open(self.path(f"{i}.out.error")) as file:
                    yield file.read()
            else:
                yield safetensors.torch.load_file(self.path(f"{i}.out"))

    def expect_pixels(self, pictures, color, tolerance, expected_of, shrink=1):
        found = self.run_jobs([(f"decode {color} {shrink}", picture) for picture in pictures.values()])
        for (name, picture), tensors in zip(pictures.items(), found):
            with self.subTest(name=name, color=color):
                self.assertIsInstance(tensors, dict, tensors)
                pixels = tensors["image"].permute(1, 2, 0).numpy().astype(int)
                expected = expected_of(Image.open(io.BytesIO(picture))).astype(int)
                expected = expected[..., None] if expected.ndim == 2 else expected
                self.assertEqual(pixels.shape, expected.shape)
                self.assertLessEqual(np.abs(pixels - expected).max(), tolerance)

    def expect_as_pillow(self, pictures, tolerance=0, gray_tolerance=None):
        self.expect_pixels(pictures, "rgb", tolerance, lambda image: np.asarray(image.convert("RGB")))
        self.expect_pixels(pictures, "gray", tolerance if gray_tolerance is None else gray_tolerance,
                           lambda image: np.asarray(image.convert("L")))

    def test_png_of_every_kind_has_the_pixels_that_pillow_decodes(self):
        kinds = [(GRAY, 1), (GRAY, 2), (GRAY, 4), (GRAY, 8), (RGB, 8), (RGB, 16), (PALETTE, 1), (PALETTE, 2), (PALETTE, 4),
                 (PALETTE, 8), (GRAY_ALPHA, 8), (RGB_ALPHA, 8), (RGB_ALPHA, 16)]
        self.expect_as_pillow({f"type {color_type}, {depth} bits, interlaced: {interlaced}":
                               png(37, 21, depth, color_type, interlaced)
                               for color_type, depth in kinds for interlaced in (False, True)})

    def test_16_bits_of_grey_become_their_upper_8(self):
        """Pillow has no 8-bit form of such a file that says so."""
        picture = png(37, 21, 16, GRAY)
        samples = np.random.default_rng(0).integers(0, 2, (21, 37, 16), dtype=np.uint8)
        upper = np.packbits(samples[..., :8], axis=-1)
        self.expect_pixels({"grey": picture}, "gray", 0, lambda _: upper)
        self.expect_pixels({"grey": picture}, "rgb", 0, lambda _: upper.repeat(3, -1))

    def test_png_with_transparency_gamma_and_other_notes_keeps_its_levels(self):
        self.expect_as_pillow({
            "gamma": png(9, 7, 8, RGB, extra=chunk(b"gAMA", struct.pack(">I", 100000))),
            "transparent colour": png(9, 7, 8, RGB, extra=chunk(b"tRNS", bytes(6))),
            "transparent level": png(9, 7, 4, GRAY, extra=chunk(b"tRNS", bytes(2))),
            "transparent entries of the palette": png(9, 7, 8, PALETTE, extra=chunk(b"tRNS", bytes(range(256)))),
            "text": png(9, 7, 8, RGB, extra=chunk(b"tEXt", b"Comment\0hello")),
        })

    def test_webp_has_the_pixels_that_pillow_decodes(self):
        self.expect_as_pillow({
            "lossless": encoded(photograph(33, 47), "WEBP", lossless=True),
            "lossless with alpha": encoded(photograph(33, 47, 4), "WEBP", lossless=True, exact=True),
        })
        self.expect_as_pillow({"lossy": encoded(photograph(33, 47), "WEBP", quality=80)}, tolerance=1)

    def test_jpeg_is_within_a_level_of_pillow(self):
        """Grey of colour is the file's luminance, Pillow's is made of rounded RGB: two levels at most."""
        pictures = {f"subsampling {subsampling}, progressive: {progressive}":
                    encoded(photograph(61, 83), "JPEG", quality=90, subsampling=subsampling, progressive=progressive)
                    for subsampling in (0, 1, 2) for progressive in (False, True)}
        pictures["grey"] = encoded(photograph(61, 83)[..., 0], "JPEG", quality=90)
        self.expect_as_pillow(pictures, tolerance=1, gray_tolerance=2)

    def test_cmyk_jpeg_is_within_a_level_of_pillow(self):
        cmyk = Image.fromarray(photograph(61, 83, 4), mode="CMYK")
        self.expect_as_pillow({"cmyk": encoded(cmyk, "JPEG", quality=90)}, tolerance=1, gray_tolerance=2)

    def test_a_jpeg_decoded_at_a_part_of_its_size_is_within_a_level_of_pillows_draft(self):
        pictures = {"even": encoded(photograph(64, 96), "JPEG"), "odd": encoded(photograph(61, 83), "JPEG")}
        for shrink in (2, 4, 8):
            def draft(image):
                image.draft("RGB", (image.width // shrink, image.height // shrink))
                return np.asarray(image)
            self.expect_pixels(pictures, "rgb", 1, draft, shrink)

    def test_a_jpeg_is_turned_upright_by_each_orientation(self):
        pictures = {}
        for orientation in range(1, 9):
            exif = Image.Exif()
            exif[0x0112] = orientation
            exif[0x010e] = "a description before the orientation"
            pictures[f"orientation {orientation}"] = encoded(photograph(40, 56), "JPEG", subsampling=0, exif=exif)
        self.expect_pixels(pictures, "rgb", 1, lambda image: np.asarray(ImageOps.exif_transpose(image)))

    def sources(self):
        """PNG, so that no decoder makes a difference."""
        return [encoded(photograph(height, width), "PNG") for height, width in [(97, 131), (131, 97), (64, 64), (40, 333)]]

    def test_evaluation_equals_torchvisions_resize_center_crop_and_normalize(self):
        for size, resize in [(48, 56), (48, 48), (120, 137)]:  # the last makes pictures larger
            transform = v2.Compose([v2.Resize(resize, antialias=True), v2.CenterCrop(size)])
            sources = self.sources()
            for source, found in zip(sources, self.run_jobs([(f"evaluate {size} {resize} 0", s) for s in sources])):
                pixels = torch.from_numpy(np.array(Image.open(io.BytesIO(source)))).permute(2, 0, 1)
                image = transform(pixels).permute(1, 2, 0).numpy()
                normalized = torchvision.transforms.functional.normalize(torchvision.transforms.functional.to_tensor(image),
                                                                         MEAN, STD)
                torch.testing.assert_close(found["image"], normalized, rtol=0, atol=0)

    def test_evaluation_is_within_a_level_of_torchvision_with_pillow(self):
        transform = torchvision.transforms.Compose([
            torchvision.transforms.Resize(56), torchvision.transforms.CenterCrop(48), torchvision.transforms.ToTensor(),
            torchvision.transforms.Normalize(MEAN, STD)])
        sources = self.sources()
        for source, found in zip(sources, self.run_jobs([("evaluate 48 56 0", s) for s in sources])):
            torch.testing.assert_close(found["image"], transform(Image.open(io.BytesIO(source))), rtol=0,
                                       atol=1.01 / 255 / min(STD))

    def test_training_equals_torchvisions_resized_crop_flip_and_normalize(self):
        functional = torchvision.transforms.functional
        jobs = [(f"train 48 {seed} 0", source) for seed in range(8) for source in self.sources()]
        mirrored = set()
        for (_, source), found in zip(jobs, self.run_jobs(jobs)):
            top, left, height, width, is_mirrored = found["crop"].tolist()
            pixels = torch.from_numpy(np.array(Image.open(io.BytesIO(source)))).permute(2, 0, 1)
            image = v2.functional.resized_crop(pixels, top, left, height, width, [48, 48], antialias=True)
            image = functional.hflip(image) if is_mirrored else image
            expected = functional.normalize(functional.to_tensor(image.permute(1, 2, 0).numpy()), MEAN, STD)
            torch.testing.assert_close(found["image"], expected, rtol=0, atol=0)
            mirrored.add(is_mirrored)
        self.assertEqual(mirrored, {0, 1})

    def test_scaled_decoding_gives_nearly_the_same_picture(self):
        """A crop begins and ends at whole pixels of the smaller picture, so it may be off by half of one."""
        y, x = np.mgrid[:400, :600] / 40
        smooth = encoded(np.stack([np.sin(x) * 100 + 128, np.cos(y) * 100 + 128, np.sin(x + y) * 100 + 128], -1)
                         .astype(np.uint8), "JPEG", quality=95)
        for job, levels in [("evaluate 48 56 {}", 4)] + [(f"train 48 {seed} {{}}", 12) for seed in range(6)]:
            whole, scaled = (found["image"] for found in self.run_jobs([(job.format(0), smooth), (job.format(1), smooth)]))
            self.assertNotEqual(whole.tolist(), scaled.tolist())
            self.assertLess((whole - scaled).abs().max().item(), levels / 255 / min(STD), job)

    def test_a_truncated_picture_is_refused_wherever_it_ends(self):
        whole = {
            "jpeg": encoded(photograph(40, 56), "JPEG"),
            "progressive jpeg": encoded(photograph(40, 56), "JPEG", progressive=True),
            "png": encoded(photograph(40, 56), "PNG")[:-12],  # IEND says nothing of the picture
            "interlaced png": png(56, 40, 8, RGB, interlaced=True)[:-12],
            "lossless webp": encoded(photograph(40, 56), "WEBP", lossless=True),
            "lossy webp": encoded(photograph(40, 56), "WEBP"),
        }
        for name, picture in whole.items():
            lengths = sorted({*range(0, 40), *range(0, len(picture), 97), *range(len(picture) - 8, len(picture))})
            found = self.run_jobs([("decode rgb 1", picture[:length]) for length in lengths])
            for length, message in zip(lengths, found):
                with self.subTest(name=name, length=length, of=len(picture)):
                    self.assertIsInstance(message, str)
                    self.assertTrue(message.startswith("cannot read the picture 'picture': "), message)

    def test_messages_of_damaged_pictures(self):
        jpeg, lossless = encoded(photograph(40, 56), "JPEG"), encoded(photograph(40, 56), "WEBP", lossless=True)
        whole_png = encoded(photograph(40, 56), "PNG")
        animation = encoded(Image.fromarray(photograph(40, 56)), "WEBP", save_all=True,
                            append_images=[Image.fromarray(255 - photograph(40, 56))])
        huge = jpeg.index(b"\xff\xc0") + 5
        cases = [
            (jpeg[:-100], "libjpeg says 'Premature end of JPEG file'"),
            (jpeg[:100], "the JPEG file ends before its picture"),
            (jpeg[:huge] + struct.pack(">HH", 60000, 60000) + jpeg[huge + 4:],
             "it has 60000 x 60000 pixels, more than max_pixels, which is 134217728"),
            (jpeg[:huge] + struct.pack(">HH", 10000, 10000) + jpeg[huge + 4:],
             f"it claims 10000 x 10000 pixels, which its {len(jpeg)} bytes cannot hold"),
            (whole_png[:len(whole_png) // 2], "libpng says 'the file ends too early'"),
            (whole_png[:-16] + bytes(4) + whole_png[-12:], "libpng says 'IDAT: CRC error'"),
            (whole_png[:20], "the PNG file does not begin with its size (IHDR)"),
            (whole_png[:16] + struct.pack(">II", 2**31 - 1, 2**31 - 1) + whole_png[24:],
             "it has 2147483647 x 2147483647 pixels, more than max_pixels, which is 134217728"),
            (whole_png[:16] + struct.pack(">II", 0, 5) + whole_png[24:], "it claims 0 x 5 pixels"),
            (whole_png[:16] + struct.pack(">II", 7, 0) + whole_png[24:], "it claims 7 x 0 pixels"),
            (lossless[:len(lossless) // 2], "the WebP file ends too early"),
            (lossless[:100] + bytes(len(lossless) - 100), "its WebP data is damaged"),
            (animation, "it is an animation; expected one picture"),
            (b"", "the file is empty"),
            (b"GIF89a and more", "it is no JPEG, PNG or WebP file: it begins with the bytes 47 49 46 38 39 61 20 61"),
            (b"\xff", "it is no JPEG, PNG or WebP file: it begins with the bytes ff"),
        ]
        for (_, reason), message in zip(cases, self.run_jobs([("decode rgb 1", picture) for picture, _ in cases])):
            with self.subTest(reason=reason):
                self.assertIsInstance(message, str)
                self.assertEqual(message, f"cannot read the picture 'picture': {reason}")

    def test_bytes_that_belong_to_nothing_between_segments_are_no_damage(self):
        """Some cameras leave them there; every reader accepts them."""
        exif = Image.Exif()
        exif[0x0112] = 6
        jpeg = encoded(photograph(40, 56), "JPEG")
        frame = jpeg.index(b"\xff\xc0")
        self.expect_as_pillow({
            "before the tables": jpeg[:20] + b"\0\0\0" + jpeg[20:],
            "stuffed": jpeg[:20] + b"\xff\0\x17\xff\xff\0" + jpeg[20:],
            "twice": jpeg[:20] + b"abc" + jpeg[20:frame] + b"d" + jpeg[frame:],
            "bytes that fill up": jpeg[:20] + b"\xff\xff" + jpeg[20:],
        }, tolerance=1, gray_tolerance=2)
        turned = encoded(photograph(40, 56), "JPEG", exif=exif)
        self.expect_pixels({"before EXIF": turned[:20] + b"abc" + turned[20:]}, "rgb", 1,
                           lambda _: np.asarray(ImageOps.exif_transpose(Image.open(io.BytesIO(turned)))))

    def test_bytes_that_belong_to_nothing_hide_no_damage(self):
        jpeg = encoded(photograph(40, 56), "JPEG")
        strays = jpeg[:20] + b"\0\0\0" + jpeg[20:]
        for length, message in zip(range(0, len(strays), 97), self.run_jobs(
                [("decode rgb 1", strays[:length]) for length in range(0, len(strays), 97)])):
            with self.subTest(length=length):
                self.assertIsInstance(message, str)
        found, = self.run_jobs([("decode rgb 1", jpeg[:-2] + b"\x12" * 100 + jpeg[-2:])])
        self.assertIn("extraneous bytes before marker 0xd9", found)

    def test_changed_bytes_of_a_scan_that_leave_some_over_are_damage(self):
        jpeg = encoded(photograph(40, 56), "JPEG")
        scan = jpeg.index(b"\xff\xda") + 14
        jobs = [("decode rgb 1", jpeg[:i] + bytes([jpeg[i] ^ 0x10]) + jpeg[i + 1:]) for i in range(scan, len(jpeg) - 2, 7)]
        messages = [result for result in self.run_jobs(jobs) if isinstance(result, str)]
        self.assertTrue(any("extraneous bytes before marker 0xd9" in message for message in messages), messages)

    def test_jpeg_with_ratios_of_samples_that_have_no_name(self):
        """The same blocks in another arrangement: four of brightness for one of each colour."""
        jpeg = encoded(photograph(32, 32), "JPEG", subsampling=2)
        factors = jpeg.index(b"\xff\xc0") + 11
        self.assertEqual(jpeg[factors], 0x22)
        self.expect_as_pillow({f"{across} x {down}": jpeg[:factors] + bytes([across << 4 | down]) + jpeg[factors + 1:]
                               for across, down in [(1, 4), (4, 1)]}, tolerance=1, gray_tolerance=2)

    def test_arithmetic_coding_needs_no_bytes_for_pixels_of_one_level(self):
        """2048 x 2048 pixels of level 200, written by libjpeg-turbo, since Pillow writes Huffman codes only."""
        picture = base64.b64decode(ARITHMETIC_JPEG)
        self.expect_pixels({"arithmetic": picture}, "gray", 0, lambda _: np.full((2048, 2048), 200))

    def test_no_damage_crashes_a_decoder(self):
        chance = random.Random(1)
        jobs = []
        for picture in (encoded(photograph(24, 32), "JPEG"), encoded(photograph(24, 32), "JPEG", progressive=True),
                        png(32, 24, 8, RGB), png(32, 24, 4, PALETTE, interlaced=True),
                        encoded(photograph(24, 32), "WEBP"), encoded(photograph(24, 32), "WEBP", lossless=True)):
            for _ in range(100):
                damaged = bytearray(picture)
                for _ in range(chance.choice([1, 1, 4, 30])):
                    damaged[chance.randrange(4, len(damaged))] = chance.randrange(256)
                jobs.append((f"decode {chance.choice(['rgb', 'gray'])} {chance.choice([1, 2])}", bytes(damaged)))
        found = list(self.run_jobs(jobs))
        self.assertEqual(len(found), len(jobs))
        self.assertTrue(all(isinstance(result, dict) or result.startswith("cannot read the picture") for result in found))


if __name__ == "__main__":
    unittest.main()
