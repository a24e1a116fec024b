"""Embeddings of the engine."""

import asyncio
import base64
import json
import re
import subprocess
import urllib.request

import forebay
import pytest
from conftest import ROOT
from test_engine import binary

numpy = pytest.importorskip("numpy", reason="embeddings are arrays of NumPy, which is not installed")

MODEL = ROOT / "models/tales-moe-sticky-Q4_K_M.gguf"
TEXTS = ["Once upon a time", "A fox", "She opened the door and looked into the garden, where it was raining."]


@pytest.fixture(scope="module")
def engine():
    with forebay.Engine(MODEL, device="cpu", context=128, parallel=4, threads=2) as engine:
        yield engine


def test_rows_have_the_length_1_and_do_not_depend_on_each_other(engine):
    rows = engine.embed(TEXTS)
    assert rows.dtype == numpy.float32 and rows.shape == (3, engine.model["hidden"])
    assert numpy.linalg.norm(rows, axis=1) == pytest.approx([1, 1, 1], abs=1e-6)
    for at, text in enumerate(TEXTS):
        alone = engine.embed(text)
        assert alone.shape == (1, engine.model["hidden"])
        assert (alone[0] == rows[at]).all()
        ids = engine.tokenize(text, add_special=True)
        assert (engine.embed(ids)[0] == rows[at]).all() and (engine.embed([ids])[0] == rows[at]).all()
    assert len({row.tobytes() for row in rows}) == 3


def test_more_texts_than_are_queued_come_in_their_order(engine):
    texts = [f"A fox and {number} geese" for number in range(70)]
    with forebay.Engine(MODEL, device="cpu", context=64, parallel=4, threads=2, queue=3) as small:
        rows = small.embed(texts)
    assert rows.shape[0] == 70
    for at in (0, 31, 32, 69):
        assert (engine.embed(texts[at])[0] == rows[at]).all()
    assert (asyncio.run(engine.aembed(texts)) == rows).all()


def test_options_have_their_effect(engine):
    raw = engine.embed(TEXTS, normalize=False)
    unit = engine.embed(TEXTS)
    assert not numpy.allclose(numpy.linalg.norm(raw, axis=1), 1)
    assert unit == pytest.approx(raw / numpy.linalg.norm(raw, axis=1, keepdims=True), abs=1e-6)
    cut = engine.embed(TEXTS, dimensions=16)
    assert cut.shape == (3, 16)
    assert cut == pytest.approx(raw[:, :16] / numpy.linalg.norm(raw[:, :16], axis=1, keepdims=True), abs=1e-6)
    last = engine.embed(TEXTS, pooling="last", normalize=False)
    assert not numpy.allclose(last, raw)
    # A text of one token has one state.
    one = engine.tokenize("fox")[:1]
    assert (engine.embed(one, pooling="last") == engine.embed(one)).all()
    assert engine.embed([]).shape == (0, engine.model["hidden"])
    assert engine.embed([], dimensions=7).shape == (0, 7)


def test_long_texts_are_cut_if_that_is_wanted(engine):
    long = "word " * 400
    with pytest.raises(forebay.OptionError, match="context"):
        engine.embed(["short", long])
    ids = engine.tokenize(long, add_special=True)
    assert len(ids) > engine.context
    assert (engine.embed(long, truncate=True) == engine.embed(ids[: engine.context])).all()
    assert (engine.embed(ids, truncate=True) == engine.embed(ids[: engine.context])).all()


@pytest.mark.parametrize(
    ("texts", "options", "words"),
    [
        ("", {}, "empty"),
        (["a", ""], {}, "empty"),
        (["a", []], {}, "empty"),
        ("a", {"dimensions": 0}, "dimensions"),
        ("a", {"dimensions": 100_000}, "dimensions"),
        ("a", {"pooling": "max"}, "pooling.*mean.*last"),
        ([1.5], {}, "texts"),
        ([1, -1], {}, "token"),
        ([2**31], {}, "vocabulary|token"),
    ],
)
def test_wrong_texts_and_options_are_errors(engine, texts, options, words):
    with pytest.raises(forebay.OptionError, match=words):
        engine.embed(texts, **options)
    with pytest.raises(forebay.OptionError, match=words):
        asyncio.run(engine.aembed(texts, **options))


def test_texts_run_beside_answers_and_a_cancelled_call_ends(engine):
    async def both():
        answers = asyncio.gather(*(engine.agenerate(text, max_tokens=16, temperature=0.0) for text in TEXTS))
        rows = await engine.aembed(TEXTS)
        return rows, await answers

    rows, answers = asyncio.run(both())
    assert (rows == engine.embed(TEXTS)).all()
    for text, answer in zip(TEXTS, answers, strict=True):
        assert answer.token_ids == engine.generate(text, max_tokens=16, temperature=0.0).token_ids

    async def cancelled():
        task = asyncio.ensure_future(engine.aembed(["word " * 60] * 200))
        await asyncio.sleep(0.05)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task

    asyncio.run(cancelled())
    assert len(engine.embed("A fox")) == 1


def test_a_closed_engine_has_no_embeddings():
    engine = forebay.Engine(MODEL, device="cpu", context=64, parallel=1, threads=1)
    engine.close()
    with pytest.raises(forebay.EngineError, match="closed"):
        engine.embed("A fox")


def test_rows_are_those_of_the_server(engine):
    arguments = ["--device", "cpu", "--ctx", "128", "--parallel", "4", "--threads", "2", "--port", "0"]
    server = subprocess.Popen([binary(), "serve", MODEL, *arguments], stderr=subprocess.PIPE, text=True)
    try:
        address = None
        while address is None:
            line = server.stderr.readline()
            assert line, "the server ended"
            found = re.search(r"http://[\d.:]+", line)
            address = found and found[0]
        for options in ({}, {"pooling": "last"}, {"dimensions": 24}):
            body = {"input": TEXTS, "encoding_format": "base64", **options}
            asked = urllib.request.Request(
                f"{address}/v1/embeddings", json.dumps(body).encode(), {"content-type": "application/json"}
            )
            with urllib.request.urlopen(asked, timeout=60) as answer:
                data = json.loads(answer.read())["data"]
            expected = [numpy.frombuffer(base64.b64decode(one["embedding"]), "<f4") for one in data]
            rows = engine.embed(TEXTS, **options)
            assert rows.tobytes() == numpy.stack(expected).tobytes()
    finally:
        server.terminate()
        server.wait(timeout=30)
