"""The demo: its encoder is the published one, it runs to its end, and it fails when it should."""

import io
import json
import math
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from rich.console import Console

from examples.demo import reading, sweep
from examples.demo.encoder import Encoder, gelu, model_folder, plain_attention
from examples.demo.show import CheckFailed
from onchip.bench import record

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="module")
def encoder():
    return Encoder(model_folder())


def embed(encoder, sentences, attention=plain_attention):
    return encoder.embed(*encoder.tokenize(sentences), attention)


def silent_console():
    return Console(file=io.StringIO(), width=100)


def test_published_similarities(encoder):
    """The example of the Hugging Face inference documentation for this model, and its answers."""
    happy, dog, very_happy, sunny = embed(
        encoder,
        [
            "That is a happy person",
            "That is a happy dog",
            "That is a very happy person",
            "Today is a sunny day",
        ],
    )
    np.testing.assert_allclose(
        [happy @ dog, happy @ very_happy, happy @ sunny],
        [0.6945773363113403, 0.9429150819778442, 0.2568760812282562],
        atol=5e-6,
    )


@pytest.mark.parametrize("attention", [plain_attention, reading.onchip_attention])
def test_padding_has_no_influence(encoder, attention):
    sentences = ["Light.", "The crust of the earth must not be looked at as a well-filled museum."]
    together = embed(encoder, sentences, attention)
    for sentence, row in zip(sentences, together, strict=True):
        alone = embed(encoder, [sentence], attention)[0]
        np.testing.assert_allclose(row, alone, atol=2e-6)


def test_gelu_is_the_exact_one():
    x = np.linspace(-10, 10, 4001, dtype=np.float32)
    wanted = [value * 0.5 * math.erfc(-value / math.sqrt(2)) for value in x.tolist()]
    np.testing.assert_allclose(gelu(x), wanted, atol=1e-6)


def test_tokens(encoder):
    tokens, lengths = encoder.tokenize(["The Crust of the earth", "embryology"])
    words = [encoder.tokenizer.id_to_token(token) for token in tokens[0]]
    assert words == ["[CLS]", "the", "crust", "of", "the", "earth", "[SEP]"]
    assert lengths.tolist() == [7, np.count_nonzero(tokens[1])]
    tokens, lengths = encoder.tokenize(["word " * 1000])
    assert tokens.shape == (1, 512)


def test_sentences_of_the_page():
    sentences = reading.sentences_of(reading.PAGE.read_text(encoding="utf-8"))
    assert len(sentences) == 36
    assert "Light will be thrown on the origin of man and his history." in sentences
    assert all(sentence.endswith(".") and "\n" not in sentence for sentence in sentences)


def test_it_runs_from_end_to_end(tmp_path):
    command = [sys.executable, "-m", "examples.demo", "--quick", "--out", str(tmp_path)]
    run = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert run.returncode == 0, run.stdout + run.stderr
    assert run.stderr == ""
    for text in (
        "Smallest cosine between the two embeddings of a sentence: 1.0000",
        "whole encoder",
        "extra memory",
        "GFLOP/s",
        "1,024",
        "entangled bank",
        str(tmp_path / "attention_cpu.png"),
        str(tmp_path / "attention_cpu.json"),
    ):
        assert text in run.stdout, run.stdout

    made = json.loads((tmp_path / "attention_cpu.json").read_text())
    record.check(made)
    cases = {sweep.case_of(seqlen).name for seqlen in sweep.QUICK_SEQLENS}
    for name in (sweep.PLAIN, sweep.ONCHIP):
        assert {r["case"] for r in made["results"] if r["impl"] == name} == cases
    assert made["skipped"] == []
    peaks = {r["impl"]: r["peak_bytes"] for r in made["results"] if "s1024" in r["case"]}
    if None not in peaks.values():
        assert peaks[sweep.ONCHIP] < peaks[sweep.PLAIN] / 2
    image = (tmp_path / "attention_cpu.png").read_bytes()
    assert image.startswith(b"\x89PNG")
    assert len(image) > 10_000


def test_wrong_attention_fails_the_first_part(monkeypatch):
    def without_the_first_key(q, k, v, lengths):
        return plain_attention(q, k[:, 1:], v[:, 1:], lengths - 1)

    monkeypatch.setattr(reading, "onchip_attention", without_the_first_key)
    with pytest.raises(CheckFailed, match="wanted > 0"):
        reading.run(silent_console(), quick=True)


@pytest.mark.parametrize("error", [1e-3, math.nan])
def test_wrong_attention_fails_the_second_part(error):
    def result(name, largest):
        return {
            "case": sweep.case_of(512).name,
            "impl": name,
            "error": {"max": largest, "max_ref": 3.0},
        }

    sweep.check_accuracy([result(sweep.PLAIN, 1e-6), result(sweep.ONCHIP, 2e-6)])
    with pytest.raises(CheckFailed, match="error against fp64"):
        sweep.check_accuracy([result(sweep.PLAIN, 1e-6), result(sweep.ONCHIP, error)])


# ---- the third part, which needs torch


def test_two_language_models_learn_and_write(tmp_path):
    pytest.importorskip("torch")
    command = [sys.executable, "-m", "examples.demo", "--train", "--quick", "--out", str(tmp_path)]
    run = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert run.returncode == 0, run.stdout + run.stderr
    assert run.stderr == ""
    for text in ("Gated DeltaNet continues:", "attention continues:", "difference"):
        assert text in run.stdout, run.stdout
    made = json.loads((tmp_path / "training_cpu.json").read_text())
    assert [result["model"] for result in made["results"]] == ["attention", "Gated DeltaNet"]
    for result in made["results"]:
        assert len(result["text"]) == 24
        assert result["curve"][-1]["held_out"] < result["curve"][0]["held_out"]
    assert (tmp_path / "training_cpu.png").read_bytes().startswith(b"\x89PNG")


def test_a_state_that_goes_astray_fails_the_third_part(monkeypatch):
    torch = pytest.importorskip("torch")
    from examples.demo import training
    from examples.demo.language_model import LanguageModel
    from onchip.torch._linear import OPERATORS

    text = training.Text()
    torch.manual_seed(0)
    model = LanguageModel(len(text.letters), training.MODELS["Gated DeltaNet"], 128)
    assert training.write_both_ways("model", model, text, 8)[1]["logit_difference"] < 1e-3
    step = OPERATORS["gated_delta_rule"]
    right = step.step
    monkeypatch.setattr(step, "step", lambda *arguments: 1.01 * right(*arguments))
    with pytest.raises(CheckFailed, match="logits differ by"):
        training.write_both_ways("model", model, text, 8)


def test_models_that_learned_nothing_fail_the_third_part():
    pytest.importorskip("torch")
    from examples.demo import training

    curve = [{"held_out": 4.5}, {"held_out": 3.1}]
    training.check_learning([{"model": "model", "curve": curve}], 3.4, quick=False)
    for last in (3.3, math.nan):
        curve[1]["held_out"] = last
        with pytest.raises(CheckFailed, match=r"wanted below 3\.2"):
            training.check_learning([{"model": "model", "curve": curve}], 3.4, quick=False)
