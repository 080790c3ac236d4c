"""`scout catalog`: build, show, check, diff, and what each says when it cannot."""

from __future__ import annotations

import json
import pathlib
import sys
from typing import Any

import pytest

from scout_core.cli import main as entry
from scout_core.cli.catalog import plot
from scout_core.cli.catalog_options import parse_rows, parse_tile
from scout_core.decision.catalog import Observation, build_catalog
from scout_core.errors import ScoutError
from scout_core.evidence.catalog_store import read_catalog

SIZES = ["--in-features", "16", "--out-features", "16", "--sms", "8"]
TILES = ["--tile", "8x16x16", "--weight-tile", "16x16x4"]


class Ran:
    def __init__(self, code: int, out: str, err: str) -> None:
        self.code, self.out, self.err = code, out, err

    @property
    def json(self) -> Any:
        return json.loads(self.out)


class Scout:
    """The command, run in this process as from a shell."""

    def __init__(self, patch: pytest.MonkeyPatch, capture: pytest.CaptureFixture[str]) -> None:
        self._patch, self._capture = patch, capture

    def __call__(self, *arguments: str) -> Ran:
        self._patch.setattr(sys, "argv", ["scout", "catalog", *arguments])
        with pytest.raises(SystemExit) as left:
            entry.main()
        captured = self._capture.readouterr()
        return Ran(int(left.value.code or 0), captured.out, captured.err)


@pytest.fixture
def scout(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Scout:
    return Scout(monkeypatch, capsys)


@pytest.fixture
def file(tmp_path: pathlib.Path) -> str:
    return str(tmp_path / "catalogue.json")


def here(scout: Scout, file: str, *options: str) -> Ran:
    return scout("build", "--out", file, *SIZES, *TILES, "--rows", "1:40", *options, "--json")


def test_build_writes_a_catalogue_that_covers_every_row_count(scout: Scout, file: str) -> None:
    built = here(scout, file)
    assert (built.code, built.json["schema"]) == (0, "scout.catalog/1")
    catalog = read_catalog(file).catalog
    assert catalog.shapes == tuple((n,) for n in range(1, 41))
    assert [tuple(r) for r in built.json["representatives"]] == list(catalog.representatives)
    assert 0 < len(catalog.representatives) < 40
    assert built.json["discovery"]["repeats"] == 3
    assert built.json["path_executions"] == catalog.path_executions
    assert not pathlib.Path(f"{file}.journal").exists()


def test_row_vectors_of_a_file_are_admissible_too(
    scout: Scout, file: str, tmp_path: pathlib.Path
) -> None:
    vectors = tmp_path / "vectors.json"
    vectors.write_text("[[5, 0], [7, 7]]")
    here(scout, file, "--experts", "2", "--vectors", str(vectors))
    catalog = read_catalog(file).catalog
    assert catalog.covers((5, 0))
    assert len(catalog.shapes) == 41


@pytest.mark.parametrize(
    ("vector", "message"),
    [
        ("[5, 0, 1]", "each of the 2 experts"),
        ("[8, 5]", "[8, 5] in"),  # rows are padded to multiples of 8
        ("[8, -8]", "multiples of 8"),
        ("[8, 8.0]", "multiples of 8"),
    ],
)
def test_row_vectors_that_the_experts_never_have_are_refused(
    scout: Scout, file: str, vector: str, message: str, tmp_path: pathlib.Path
) -> None:
    vectors = tmp_path / "vectors.json"
    vectors.write_text(f"[[8, 16], {vector}]")
    more = ("--rows", "8:64:8", "--experts", "2", "--vectors", str(vectors))
    refused = scout("build", "--out", file, *SIZES, *more)
    assert refused.code == 2
    assert message in refused.err.replace("\n", " ")


def test_aligned_rows_are_observed_and_their_alignment_noted(scout: Scout, file: str) -> None:
    scout("build", "--out", file, *SIZES, "--rows", "8:64:8")
    found = read_catalog(file)
    assert found.environment.row_alignment == 8
    assert len(found.catalog.shapes) == 8


def test_show_prints_environment_regimes_reduction_and_plot(scout: Scout, file: str) -> None:
    built = here(scout, file).json
    shown = scout("show", file)
    assert shown.code == 0
    for text in ("kernel_settings: tile 8x16x16", "forward", "cover 40 shapes", "|", "#"):
        assert text in shown.out
    assert f"{len(built['representatives'])} representatives" in shown.out
    assert scout("show", file, "--json").json["regimes"] == built["regimes"]


def test_check_accepts_the_environment_of_the_discovery_and_names_drift(
    scout: Scout, file: str, tmp_path: pathlib.Path
) -> None:
    same = tmp_path / "same.json"
    same.write_text(json.dumps({"num_sms": 8}))
    here(scout, file, "--environment", str(same))
    accepted = scout("check", file, "--environment", str(same), "--json")
    assert (accepted.code, accepted.json["reliance"]) == (0, "catalogue")
    other = tmp_path / "other.json"
    other.write_text(json.dumps({"num_sms": 8, "driver": "590.1"}))
    drifted = scout("check", file, "--environment", str(other), "--json")
    assert (drifted.code, drifted.json["reliance"]) == (3, "exact")
    assert [each["field"] for each in drifted.json["differences"]] == ["driver"]
    refused = scout("check", file, "--environment", str(other), "--on-drift", "not_covered")
    assert refused.code == 3
    assert "expert replay not covered" in refused.out


def test_check_refuses_a_file_that_was_changed(scout: Scout, file: str) -> None:
    here(scout, file)
    path = pathlib.Path(file)
    path.write_text(path.read_text().replace('"repeats":3', '"repeats":5'))
    checked = scout("check", file)
    assert checked.code == 2
    assert "the file was changed after it was written" in checked.err


def test_diff_names_fields_shapes_and_representatives(
    scout: Scout, file: str, tmp_path: pathlib.Path
) -> None:
    here(scout, file)
    other = str(tmp_path / "other.json")
    scout("build", "--out", other, *SIZES, *TILES, "--rows", "1:41", "--degrees", "d=8")
    equal = scout("diff", file, file)
    assert (equal.code, equal.out) == (0, "")
    found = scout("diff", file, other, "--json")
    assert found.code == 3
    assert [each["field"] for each in found.json["environment"]] == ["degrees"]
    assert (found.json["shapes_added"], found.json["shapes_removed"]) == ([[41]], [])
    assert "shapes_added: 1 (41)" in scout("diff", file, other).out


def test_a_build_that_could_not_be_written_goes_on_without_observing_again(
    scout: Scout, file: str
) -> None:
    path, journal = pathlib.Path(file), pathlib.Path(f"{file}.journal")
    path.mkdir()
    refused = here(scout, file)
    assert refused.code == 2
    assert "the catalogue cannot be written" in refused.err
    assert len(journal.read_text().splitlines()) == 1 + 3 * 40
    path.rmdir()
    assert here(scout, file).json["discovery"]["resumed"] == 3 * 40
    assert len(read_catalog(file).catalog.shapes) == 40
    assert not journal.exists()


def test_on_a_cpu_the_torch_profiler_falls_back_to_exact_shapes(scout: Scout, file: str) -> None:
    import torch

    if torch.cuda.is_available():
        pytest.skip("this machine has a GPU")
    options = ("--source", "torch-profiler", "--rows", "1:2")
    built = scout("build", "--out", file, *SIZES, *options, "--json").json
    assert built["exact_shapes"] == len(built["representatives"]) == 2
    assert list(built["discovery"]["unseen"].values()) == [2]
    assert "no launch geometry" in scout("show", file).out


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--repeats", "2"], "repeats=2 of a discovery must be >= 3"),
        (["--rows", "9"], "--rows '9' must be"),
        (["--rows", "9:3"], "holds no row count"),
        (["--rows", "1:64:8"], "never makes"),
        (["--tile", "3x4x4"], "--tile '3x4x4' must be"),
        (["--weight-tile", "4x4"], "--weight-tile '4x4' must be"),
        (["--degrees", "unknown"], "degrees='unknown' is a placeholder"),
        (["--dtype", "bfloat16"], "our kernel is float32"),
        (["--per-program", "--source", "torch-profiler"], "--per-program needs --source model"),
        (["--source", "torch-profiler", "--dtype", "float7"], "is no dtype of torch"),
        (["--environment", "/no/such/file"], "cannot be read from /no/such/file"),
        (["--vectors", "/no/such/file"], "cannot be read from /no/such/file"),
    ],
)
def test_options_that_cannot_be_used_say_why(
    scout: Scout, file: str, options: list[str], message: str
) -> None:
    refused = scout("build", "--out", file, *SIZES, *options)
    assert refused.code == 2
    assert message in refused.err
    assert not pathlib.Path(file).exists()


def test_per_program_paths_need_more_representatives(scout: Scout, file: str) -> None:
    coarse = here(scout, file).json["representatives"]
    fine = here(scout, file, "--per-program").json["representatives"]
    assert len(fine) > len(coarse)


def test_the_plot_draws_each_shape_on_the_line_of_its_representative() -> None:
    counts = {1: (1, 0), 2: (2, 0), 3: (0, 1), 4: (3, 0)}
    catalog = build_catalog([Observation(n, "F", c) for n, c in counts.items()])
    assert plot(catalog) == ["4 |## #", "3 |  # ", "  +----", "   1  4"]


def test_the_plot_says_how_many_lines_it_leaves_out() -> None:
    catalog = build_catalog([Observation(n, str(n), (1,)) for n in range(1, 61)])
    assert any("12 representatives of smaller shapes" in line for line in plot(catalog))


def test_texts_are_read_strictly() -> None:
    assert list(parse_rows("4:9:2")) == [4, 6, 8]
    assert parse_tile("--tile", "16x32x8") == (16, 32, 8)
    for text in ("", "16x16", "16x16x16x16", "0x1x1", "ax1x1"):
        with pytest.raises(ScoutError):
            parse_tile("--tile", text)
