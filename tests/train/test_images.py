"""Images and their names as people have them."""

from __future__ import annotations

import os
import unicodedata
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from crowdnal.train import InputError, images

RAMP = np.arange(256, dtype=np.uint8).reshape(16, 16)


def read(path: Path, mode: str = "L") -> np.ndarray:
    return np.asarray(images.read_image(path, mode))


@pytest.mark.parametrize("name", ["a.png", "a.tif"])
@pytest.mark.parametrize("bits", [8, 10, 12, 14, 16])
def test_deep_pixels_are_scaled_not_clipped(tmp_path: Path, name: str, bits: int) -> None:
    top = (1 << bits) - 1
    deep = np.linspace(0, top, 64 * 64).round().astype(np.uint16).reshape(64, 64)
    Image.fromarray(deep).save(tmp_path / name)
    found = read(tmp_path / name)
    assert np.array_equal(found, (deep / top * 255).round().astype(np.uint8)) and len(np.unique(found)) == 256
    assert np.array_equal(read(tmp_path / name, "RGB"), np.repeat(found[:, :, None], 3, 2))


def test_a_picture_kept_at_16_bits_is_the_same_picture(tmp_path: Path) -> None:
    Image.fromarray(RAMP.astype(np.uint16) * 257).save(tmp_path / "a.png")
    assert np.array_equal(read(tmp_path / "a.png"), RAMP)


def test_floats_and_negative_numbers(tmp_path: Path) -> None:
    unit = RAMP / np.float32(255)
    for pixels, expected in (
        (unit, RAMP),
        (unit * 0.5, RAMP * 0.5),  # 0 to 1 is a scale, not this picture's own
        (unit * 3000 - 1000, RAMP),
        ((RAMP.astype(np.int32) - 128) * 10, RAMP),
        (np.zeros((4, 4), np.float32) + 7, np.zeros((4, 4))),
    ):
        Image.fromarray(pixels).save(tmp_path / "a.tif")
        assert np.abs(read(tmp_path / "a.tif") - expected).max() <= 0.5
    Image.fromarray(unit * np.nan).save(tmp_path / "a.tif")
    with pytest.raises(InputError, match=r"a\.tif cannot be read as an image \(it has pixels that are NaN"):
        read(tmp_path / "a.tif")


def test_modes(tmp_path: Path) -> None:
    colours = np.stack([RAMP, RAMP[::-1], RAMP.T], 2)
    rgb = Image.fromarray(colours)
    rgb.quantize(256).save(tmp_path / "palette.png")
    assert np.abs(read(tmp_path / "palette.png", "RGB").astype(int) - colours).mean() < 20
    rgb.convert("CMYK").save(tmp_path / "cmyk.tif")
    assert np.array_equal(read(tmp_path / "cmyk.tif", "RGB"), colours)
    clear = np.dstack([colours, np.full((16, 16), 255, np.uint8)])
    clear[:8, :, 3] = 0
    Image.fromarray(clear).save(tmp_path / "alpha.png")
    found = read(tmp_path / "alpha.png", "RGB")
    assert (found[:8] == 255).all() and np.array_equal(found[8:], colours[8:])
    Image.fromarray(np.zeros((4, 4), np.uint8)).convert("P").save(tmp_path / "clear.gif", transparency=0)
    assert (read(tmp_path / "clear.gif") == 255).all()
    Image.fromarray(RAMP > 100).save(tmp_path / "bits.png")
    assert np.array_equal(read(tmp_path / "bits.png"), (RAMP > 100) * 255)


def test_pictures_are_turned_as_they_were_seen(tmp_path: Path) -> None:
    exif = Image.Exif()
    exif[0x0112] = 6  # lies on its side
    Image.fromarray(RAMP[:, :8]).save(tmp_path / "a.png", exif=exif)
    assert np.array_equal(read(tmp_path / "a.png"), np.rot90(RAMP[:, :8], -1))


def test_the_first_of_several_pictures(tmp_path: Path) -> None:
    frames = [Image.fromarray(np.full((4, 4), value, np.uint8)) for value in (10, 200)]
    for name in ("a.gif", "a.tif", "a.png"):
        frames[0].save(tmp_path / name, save_all=True, append_images=frames[1:])
        assert (read(tmp_path / name) == 10).all()


def test_what_cannot_be_read_is_one_line_with_its_name(tmp_path: Path, monkeypatch) -> None:
    whole = tmp_path / "a.png"
    Image.fromarray(np.random.default_rng(0).integers(0, 255, (64, 64, 3), np.uint8)).save(whole)
    content = whole.read_bytes()
    for damaged in (content[:2000], content[:40], b"", b"DICM" * 50, content[:60] + bytes(500) + content[560:]):
        whole.write_bytes(damaged)
        with pytest.raises(InputError, match=r"a\.png cannot be read as an image .*: mend, convert or remove it$"):
            read(whole, "RGB")
    Image.fromarray(RAMP).save(whole)
    monkeypatch.setattr(Image, "MAX_IMAGE_PIXELS", 100)
    with pytest.raises(InputError, match=r"a\.png is too large to be read \(more than 0 million pixels\): make it"):
        read(whole)
    monkeypatch.setattr(Image, "MAX_IMAGE_PIXELS", 200)  # a warning of Pillow's, no error
    assert np.array_equal(read(whole), RAMP)


def test_folders_that_are_links(tmp_path: Path) -> None:
    (tmp_path / "far" / "deep").mkdir(parents=True)
    (tmp_path / "far" / "deep" / "b.png").touch()
    root = tmp_path / "images"
    (root / ".hidden").mkdir(parents=True)
    for name in ("a.JPG", ".hidden/x.png", ".y.png", "notes.txt"):
        (root / name).touch()
    os.symlink(tmp_path / "far", root / "linked")
    os.symlink(root, root / "round")  # never ends
    os.symlink(tmp_path / "nowhere.png", root / "broken.png")
    os.symlink(tmp_path / "far" / "deep" / "b.png", root / "c.png")
    assert images.find_images(root, "--images") == ["a.JPG", "c.png", "linked/deep/b.png"]
    (tmp_path / "scans").mkdir()
    (tmp_path / "scans" / "x.dcm").touch()
    with pytest.raises(InputError, match=r"holds no images .*; it has .*x\.dcm: convert such files to PNG"):
        images.find_images(tmp_path / "scans", "--images")


NAMES = ["img_001.jpg", "my photo.jpg", unicodedata.normalize("NFD", "café.jpg"), "b/2.PNG", "b/c/3.png", "d/3.png"]


@pytest.mark.parametrize(
    ("task", "name"),
    [
        ("https://example.org/files/img_001.jpg?X-Signature=a%2Fb&expires=3", "img_001.jpg"),
        ("s3://bucket/some/where/img_001.jpg", "img_001.jpg"),
        ("/data/local-files/?d=pets/b/2.PNG", "b/2.PNG"),
        ("/home/somebody/photos/img_001.jpg", "img_001.jpg"),
        ("C:\\photos\\b\\c\\3.png", "b/c/3.png"),
        ("/elsewhere/d/3.png", "d/3.png"),
        ("photos/train/b/c/3.png", "b/c/3.png"),
        ("c/3.png", "b/c/3.png"),
        ("my%20photo.jpg", "my photo.jpg"),
        ("IMG_001.JPG", "img_001.jpg"),
        ("2.png", "b/2.PNG"),
        ("B\\2", "b/2.PNG"),
        (unicodedata.normalize("NFC", "café.jpg"), NAMES[2]),
        (unicodedata.normalize("NFC", "https://x.org/café.jpg"), NAMES[2]),
        ("caf%C3%A9", NAMES[2]),
    ],
)
def test_what_tasks_are_called(tmp_path: Path, task: str, name: str) -> None:
    assert images.match([task], NAMES, tmp_path, str) == {task: NAMES.index(name)}


@pytest.mark.parametrize(
    ("task", "words"),
    [
        ("ab12cd34-img_001.jpg", r"it has img_001\.jpg: take the prefix 'ab12cd34-' out of the tasks"),
        ("3.png", r"could be b/c/3\.png, d/3\.png"),
        ("/somewhere/else/3.png", r"could be b/c/3\.png, d/3\.png"),
        ("e/3.png", "no image 'e/3.png'"),  # another folder is another image
        ("img_002.jpg", r"near matches: img_001\.jpg"),
    ],
)
def test_what_no_file_or_several_may_be(tmp_path: Path, task: str, words: str) -> None:
    with pytest.raises(InputError, match=words):
        images.match([task], NAMES, tmp_path, "row {}".format)


def test_exact_names_come_first(tmp_path: Path) -> None:
    names = ["a%20b.png", "a b.png", "X.png", "x.png", "x/x.png", "é.png", unicodedata.normalize("NFD", "é.png")]
    assert images.match(names, names, tmp_path, str) == {name: i for i, name in enumerate(names)}
    with pytest.raises(InputError, match="could be X.png, x.png"):
        images.match(["X.PNG"], names[2:4], tmp_path, str)
    with pytest.raises(InputError, match="tasks 'http://h/x.png' and 'x.png' are both x.png"):
        images.match(["http://h/x.png", "x.png"], ["x.png"], tmp_path, lambda n: f"row {n}")
