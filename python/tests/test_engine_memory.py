"""Keys and values on disk, and layers that predict further tokens."""

import json
import logging
import stat
import subprocess
import sys
import threading
import time

import forebay
import pytest
from conftest import ROOT, write_safetensors

numpy = pytest.importorskip("numpy", reason="models of the tests are made with NumPy, which is not installed")

MODEL = ROOT / "models/tales-moe-sticky-Q4_K_M.gguf"
GREEDY = {"temperature": 0.0}
PROMPT = "Once upon a time there was a fox who lived beside a river. " * 8
USUAL = {"device": "cpu", "context": 512, "parallel": 2, "threads": 2}

ANOTHER_PROCESS = """
import json, sys, forebay
with forebay.Engine(sys.argv[1], **json.loads(sys.argv[2])) as engine:
    answer = engine.generate(sys.argv[3], max_tokens=24, temperature=0.0)
    print(json.dumps([answer.token_ids, answer.usage.cached_tokens, answer.statistics, engine.statistics()["kv_tiers"]]))
"""


def in_another_process(**options):
    arguments = [MODEL, json.dumps({**USUAL, **options}), PROMPT]
    ran = subprocess.run([sys.executable, "-c", ANOTHER_PROCESS, *arguments], capture_output=True, check=True)
    return json.loads(ran.stdout)


def test_another_process_continues_from_the_disk(tmp_path):
    folder = tmp_path / "kv"
    with forebay.Engine(MODEL, **USUAL) as engine:
        expected = engine.generate(PROMPT, max_tokens=24, **GREEDY)
    first, cached, _, _ = in_another_process(kv_disk=str(folder))
    assert (first, cached) == (expected.token_ids, 0)
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    again, cached, statistics, tiers = in_another_process(kv_disk=str(folder))
    assert again == expected.token_ids
    # All whole blocks of the prompt but the last token, which gives the logits.
    assert cached == statistics["cached_tokens_from_disk"] == (expected.usage.prompt_tokens - 1) // 16 * 16 > 0
    assert tiers["disk_positions"] == cached and tiers["disk_read_bytes"] > 0
    # Without the folder, nothing is known.
    assert in_another_process()[:2] == [expected.token_ids, 0]


def test_a_second_engine_continues_a_chat_from_the_disk(tmp_path):
    options = {**USUAL, "kv_disk": tmp_path / "kv", "kv_disk_size": "64MiB", "kv_disk_writes_per_day": "1GiB"}
    messages = [{"role": "user", "content": PROMPT}]
    with forebay.Engine(MODEL, **options) as engine:
        answer = engine.chat(messages, max_tokens=24, **GREEDY)
    messages += [answer.message, {"role": "user", "content": "And then?"}]
    with forebay.Engine(MODEL, **USUAL) as engine:
        expected = engine.chat(messages, max_tokens=16, **GREEDY)
    with forebay.Engine(MODEL, **options) as engine:
        continued = engine.chat(messages, max_tokens=16, **GREEDY)
        assert continued.token_ids == expected.token_ids
        assert continued.statistics["cached_tokens_from_disk"] > 64


def test_an_encrypted_folder_needs_its_key(tmp_path, caplog):
    key, other = tmp_path / "key", tmp_path / "other"
    for path, byte in ((key, b"k"), (other, b"o")):
        path.write_bytes(byte * 32)
        path.chmod(0o600)
    folder = tmp_path / "kv"
    in_another_process(kv_disk=str(folder), kv_disk_encrypt=str(key))
    _, cached, _, _ = in_another_process(kv_disk=str(folder), kv_disk_encrypt=str(key))
    assert cached > 0
    with pytest.raises(forebay.OptionError, match="encrypted"):
        forebay.Engine(MODEL, kv_disk=folder, **USUAL)
    # As with the command line, blocks of another key are not used.
    with forebay.Engine(MODEL, kv_disk=folder, kv_disk_encrypt=other, **USUAL) as engine:
        assert engine.generate(PROMPT, max_tokens=1).usage.cached_tokens == 0
        assert engine.statistics()["kv_tiers"]["disk"] is None
    assert [(record.name, record.levelname) for record in caplog.records] == [("forebay", "WARNING")]
    assert "another key" in caplog.records[0].message
    key.chmod(0o644)
    with pytest.raises(forebay.OptionError, match="chmod 600"):
        forebay.Engine(MODEL, kv_disk=folder, kv_disk_encrypt=key, **USUAL)
    other.write_bytes(b"short")
    with pytest.raises(forebay.OptionError, match="32"):
        forebay.Engine(MODEL, kv_disk=folder, kv_disk_encrypt=other, **USUAL)
    with pytest.raises(FileNotFoundError):
        forebay.Engine(MODEL, kv_disk=folder, kv_disk_encrypt=tmp_path / "none", **USUAL)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"kv_disk": "DIR", "kv_ram": 0}, ": kv_ram must not be 0"),
        ({"kv_disk": "DIR", "kv_disk_type": "q8_0", "exact": True}, r"\bexact\b"),
        ({"kv_disk": "DIR", "kv_disk_type": "q8_0", "kv_type": "q8_0"}, "kv_type"),
        ({"kv_disk": "DIR", "kv_disk_type": "f32"}, "kv_disk_type.*as-cached"),
        ({"kv_disk": "DIR", "kv_disk_size": 0}, "kv_disk_size is 0"),
        ({"kv_disk_type": "q8_0"}, "kv_disk_type needs kv_disk"),
        ({"kv_disk_encrypt": "key"}, "kv_disk_encrypt needs kv_disk"),
        ({"mtp": True}, "mtp|multi-token"),
        ({"mtp": True, "parallel": 2}, "one sequence"),
    ],
)
def test_wrong_options_are_errors(tmp_path, options, words):
    options = {name: str(tmp_path / "kv") if value == "DIR" else value for name, value in options.items()}
    with pytest.raises(forebay.OptionError, match=words):
        forebay.Engine(MODEL, device="cpu", context=64, **options)


def test_a_folder_that_is_none_is_an_error(tmp_path):
    (tmp_path / "file").write_bytes(b"text")
    tmp_path.chmod(0o700)
    with pytest.raises(forebay.OptionError, match="not a folder of KV blocks"):
        forebay.Engine(MODEL, kv_disk=tmp_path, **USUAL)
    with pytest.raises(OSError):
        forebay.Engine(MODEL, kv_disk=tmp_path / "file" / "kv", **USUAL)


def test_rounded_blocks_are_half_as_large(tmp_path):
    for name in ("as-cached", "q8_0"):
        options = {**USUAL, "kv_disk": tmp_path / name, "kv_disk_type": name}
        for turn in range(2):
            with forebay.Engine(MODEL, **options) as engine:
                answer = engine.generate(PROMPT, max_tokens=4, **GREEDY)
                assert (answer.usage.cached_tokens > 0) == (turn == 1)
                # With rounded keys and values, an answer depends on what was found.
                assert answer.statistics["exact"] == (name == "as-cached")
                tiers = engine.statistics()["kv_tiers"]
        assert (tiers["disk_read_bytes"] > 0) and tiers["disk"]["blocks"] > 0


def predicting(folder, share):
    """Make a small model whose layers change the residual stream by `share` of the usual, and whose predicting layer then
    proposes what the model itself would choose."""
    source = ROOT / "fixtures/formulas/glm-mtp"
    with forebay.safe_open(source / "model.safetensors", framework="np") as file:
        tensors = {name: file.get_tensor(name).copy() for name in file.keys()}
    for name, values in tensors.items():
        if name.endswith(("o_proj.weight", "down_proj.weight")):
            values *= share
        elif name.endswith("shared_head.norm.weight"):
            values[:] = tensors["model.norm.weight"]
        elif name.endswith("shared_head.head.weight"):
            values[:] = tensors["lm_head.weight"]
        elif name.endswith("layers.2.embed_tokens.weight"):
            values[:] = tensors["model.embed_tokens.weight"]
        elif name.endswith("enorm.weight"):
            values[:] = 1
        elif name.endswith("eh_proj.weight"):
            values *= 0.1 * share
            values[numpy.arange(len(values)), numpy.arange(len(values))] += 1
    write_safetensors(
        folder / "model.safetensors",
        {name: ("F32", list(values.shape), values.tobytes()) for name, values in tensors.items()},
    )
    (folder / "config.json").write_bytes((source / "config.json").read_bytes())
    tokenizer = json.loads((ROOT / "fixtures/models/qwen3_moe/tokenizer.json").read_text())
    letters = list(tokenizer["model"]["vocab"])[:120]
    tokenizer["model"].update(vocab={letter: at for at, letter in enumerate(letters)}, merges=[])
    tokenizer["added_tokens"] = []
    tokenizer["post_processor"] = None
    (folder / "tokenizer.json").write_text(json.dumps(tokenizer))
    return folder


def reported(engine, is_enough):
    """Return the statistics as soon as they are enough, or after ten seconds."""
    end = time.monotonic() + 10
    while not is_enough(statistics := engine.statistics()) and time.monotonic() < end:
        time.sleep(0.01)
    return statistics


@pytest.mark.parametrize("share", [0.0, 0.01])
def test_proposals_change_no_answer_and_save_passes(tmp_path, share):
    model = predicting(tmp_path, share)
    prompts = [[3, 17, 90, 41, 41, 5], list(range(40)), [*range(36), 9]]
    answers = []
    for mtp in (False, True):
        with forebay.Engine(model, device="cpu", context=128, threads=1, parallel=1, mtp=mtp) as engine:
            assert engine.parallel == 1
            options = [GREEDY, {"seed": 5, "temperature": 1.0, "top_k": 20, "logprobs": 2}]
            answers.append([engine.generate(prompt, max_tokens=33, **of) for of in options for prompt in prompts])
            answers[-1] += engine.batch(prompts, max_tokens=12, **GREEDY)
            tokens = sum(len(answer.token_ids) for answer in answers[-1])
            # The first token of an answer comes from its prompt. The engine reports a moment after the last answer.
            generated = tokens - len(answers[-1])
            statistics = reported(engine, lambda of: of["engine"]["generated_tokens"] == generated)
    for without, with_proposals in zip(*answers, strict=True):
        assert without.token_ids == with_proposals.token_ids
        assert without.logprobs == with_proposals.logprobs
    of = statistics["session"]["mtp"]
    assert of["proposals"] >= of["accepted"] > 0
    assert of["acceptance"] == pytest.approx(of["accepted"] / of["proposals"])
    assert of["passes"] + of["accepted"] == generated
    assert statistics["engine"]["generate_passes"] == of["passes"]
    if share == 0.0:
        greedy = sum(len(answer.token_ids) - 1 for answer in answers[1] if answer.logprobs is None)
        assert of["accepted"] > 0.4 * greedy


def test_an_engine_with_proposals_alone_takes_one_request_at_a_time(tmp_path):
    model = predicting(tmp_path, 0.0)
    with forebay.Engine(model, device="cpu", threads=1, mtp=True) as engine:
        assert engine.parallel == 1
        assert len(engine.embed([[1, 2, 3], [4]])) == 2
        assert engine.generate([1, 2, 3], max_tokens=8, **GREEDY).usage.completion_tokens == 8
    with forebay.Engine(model, device="cpu", threads=1, parallel=1) as engine:
        assert "mtp" not in engine.statistics()["session"]


def test_messages_of_the_engine_reach_the_logger(tmp_path, caplog):
    model = predicting(tmp_path, 0.0)
    options = {"device": "cpu", "context": 64, "threads": 1, "parallel": 1}
    with forebay.Engine(model, **options):
        assert [(record.name, record.levelname) for record in caplog.records] == [("forebay", "WARNING")]
        assert "no chat template" in caplog.text
    caplog.clear()
    with caplog.at_level(logging.DEBUG, logger="forebay"), forebay.Engine(model, **options) as engine:
        assert any("open{" in record.message and record.levelname == "DEBUG" for record in caplog.records)
        engine.generate([1, 2, 3], max_tokens=4, **GREEDY)
    assert sum("token{" in record.message for record in caplog.records) == 3
    assert "\x1b" not in caplog.text
    caplog.clear()
    with caplog.at_level(logging.ERROR, logger="forebay"), forebay.Engine(model, **options) as engine:
        engine.generate([1, 2, 3], max_tokens=4, **GREEDY)
    assert caplog.records == []


def test_a_thread_hands_messages_on_while_the_engine_works(tmp_path):
    model = predicting(tmp_path, 0.0)
    came, wanted = [], threading.Event()

    class Handler(logging.Handler):
        def emit(self, record):
            came.append(threading.current_thread().name)
            # A handler may use the engine.
            if "token{" in record.getMessage():
                engine.tokenize("a")
                wanted.set()

    logger, handler = logging.getLogger("forebay"), Handler()
    level = logger.level
    logger.addHandler(handler)
    try:
        logger.setLevel(logging.DEBUG)
        with forebay.Engine(model, device="cpu", context=64, threads=1, parallel=1) as engine:
            engine.generate([1, 2, 3], max_tokens=8, **GREEDY)
            assert wanted.wait(30)
        assert "forebay-log" in came
    finally:
        logger.removeHandler(handler)
        logger.setLevel(level)


def test_messages_at_the_end_of_the_interpreter_are_not_lost(tmp_path):
    model = predicting(tmp_path, 0.0)
    program = (
        "import logging, sys, forebay\n"
        "logging.basicConfig(level=logging.DEBUG, format='%(name)s %(levelname)s %(message)s')\n"
        "engine = forebay.Engine(sys.argv[1], device='cpu', context=64, threads=1, parallel=1)\n"
        "print(engine.generate([1, 2, 3], max_tokens=4, temperature=0).token_ids)\n"
    )
    ran = subprocess.run([sys.executable, "-c", program, model], capture_output=True, check=True, text=True, timeout=60)
    assert ran.stderr.count("token{") == 3 and "forebay WARNING" in ran.stderr
