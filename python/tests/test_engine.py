"""The engine: answers, streams, event loops, forms of answers, errors."""

import asyncio
import gc
import json
import os
import pathlib
import re
import signal
import subprocess
import threading
import time

import forebay
import pytest
from conftest import ROOT

MODEL = ROOT / "models/tales-moe-sticky-Q4_K_M.gguf"
PROMPTS = [
    "Once upon a time", "The king", "In the forest there was", "She opened the door and", "The old man said",
    "It was a dark night", "A fox", "The river",
]  # fmt: skip
GREEDY = {"temperature": 0.0}


@pytest.fixture(scope="module")
def engine():
    with forebay.Engine(MODEL, device="cpu", context=512, parallel=8, threads=2) as engine:
        yield engine


def binary() -> pathlib.Path:
    """Return the command line, as the tests in Rust build it."""
    for path in (os.environ.get("FOREBAY_BINARY"), ROOT / "target/ci/forebay", ROOT / "target/release/forebay"):
        if path and pathlib.Path(path).is_file():
            return pathlib.Path(path)
    pytest.skip("the command line is not built (target/ci/forebay), so it cannot be compared with")


def test_greedy_tokens_are_those_of_the_command_line(engine):
    for prompt in PROMPTS[:2]:
        arguments = ["--raw", "--prompt", prompt, "--temperature", "0", "--max-tokens", "48", "--json"]
        arguments += ["--device", "cpu", "--ctx", "512"]
        ran = subprocess.run([binary(), "run", MODEL, *arguments], capture_output=True, check=True)
        expected = json.loads(ran.stdout)
        answer = engine.generate(prompt, max_tokens=48, **GREEDY)
        assert answer.token_ids == expected["tokens"]
        assert answer.text == expected["text"]
        assert answer.usage == forebay.Usage(
            expected["prompt_tokens"], answer.usage.cached_tokens, expected["generated_tokens"]
        )
        assert answer.finish_reason == "length"


def test_a_seed_gives_the_same_answer_and_options_have_an_effect(engine):
    one = engine.generate(PROMPTS[0], max_tokens=24, seed=7, temperature=1.2, top_k=0, top_p=1.0, min_p=0.0)
    again = engine.generate(PROMPTS[0], max_tokens=24, seed=7, temperature=1.2, top_k=0, top_p=1.0, min_p=0.0)
    other = engine.generate(PROMPTS[0], max_tokens=24, seed=8, temperature=1.2, top_k=0, top_p=1.0, min_p=0.0)
    assert one.token_ids == again.token_ids != other.token_ids
    # With one candidate, the temperature has no effect.
    first = engine.generate(PROMPTS[0], max_tokens=24, top_k=1, temperature=2.0)
    assert first.token_ids == engine.generate(PROMPTS[0], max_tokens=24, **GREEDY).token_ids
    banned = first.token_ids[0]
    biased = engine.generate(PROMPTS[0], max_tokens=1, logit_bias={banned: -100}, **GREEDY)
    assert biased.token_ids != [banned]


def test_a_prompt_may_be_token_ids(engine):
    ids = engine.tokenize(PROMPTS[0], add_special=True)
    assert engine.generate(ids, max_tokens=8, **GREEDY).token_ids == (
        engine.generate(PROMPTS[0], max_tokens=8, **GREEDY).token_ids
    )
    assert engine.detokenize(engine.tokenize("A fox, a king.")).strip() == "A fox, a king."
    with pytest.raises(forebay.OptionError, match="vocabulary"):
        engine.detokenize([engine.vocab_size])


def test_a_stream_has_the_parts_of_the_answer(engine):
    whole = engine.generate(PROMPTS[1], max_tokens=32, logprobs=2, **GREEDY)
    with engine.stream(PROMPTS[1], max_tokens=32, logprobs=2, **GREEDY) as stream:
        parts = list(stream)
    assert "".join(part.text for part in parts) == whole.text == stream.answer.text
    assert [part.token_id for part in parts] == [*whole.token_ids, None]
    assert [part.logprob for part in parts[:-1]] == whole.logprobs == stream.answer.logprobs
    assert [part.finish_reason for part in parts[-2:]] == [None, "length"]


def test_stop_texts_end_an_answer(engine):
    whole = engine.generate(PROMPTS[0], max_tokens=40, **GREEDY)
    word = re.findall(r"\w+", whole.text)[4]
    stopped = engine.generate(PROMPTS[0], max_tokens=40, stop=["not in the text", word], **GREEDY)
    assert (stopped.finish_reason, stopped.stop) == ("stop", word)
    assert stopped.text == whole.text[: whole.text.index(word)]


def test_logprobs_are_those_of_the_choice(engine):
    answer = engine.generate(PROMPTS[2], max_tokens=16, logprobs=5, **GREEDY)
    assert len(answer.logprobs) == len(answer.token_ids)
    for token, number in zip(answer.logprobs, answer.token_ids, strict=True):
        # Greedy takes the likeliest.
        assert token.id == number == token.likeliest[0].id
        assert token.logprob == token.likeliest[0].logprob <= 0
        chances = [likely.logprob for likely in token.likeliest]
        assert len(chances) == 5 and chances == sorted(chances, reverse=True)
    text = b"".join(token.bytes for token in answer.logprobs).decode()
    assert text == answer.text
    # The probability of a token does not depend on how it was asked for: the same tokens as a prompt give the next.
    ids = engine.tokenize(PROMPTS[2], add_special=True) + answer.token_ids[:8]
    after = engine.generate(ids, max_tokens=1, logprobs=5, **GREEDY)
    assert after.logprobs[0].id == answer.logprobs[8].id
    assert after.logprobs[0].logprob == pytest.approx(answer.logprobs[8].logprob, abs=2e-2)
    assert engine.generate(PROMPTS[2], max_tokens=4, **GREEDY).logprobs is None


def test_answers_have_the_form_that_was_asked_for(engine):
    schema = {
        "type": "object",
        "properties": {"name": {"type": "string", "maxLength": 12}, "age": {"type": "integer", "minimum": 0, "maximum": 150}},
        "required": ["name", "age"],
        "additionalProperties": False,
    }
    for seed in range(4):
        answer = engine.generate("A person as JSON: ", schema=schema, max_tokens=200, seed=seed)
        assert answer.finish_reason == "stop", answer
        made = answer.parsed()
        assert set(made) == {"name", "age"} and isinstance(made["age"], int) and len(made["name"]) <= 12
    assert re.fullmatch(r"[0-9]{3}-[a-f]{2}", engine.generate("Code: ", regex=r"[0-9]{3}-[a-f]{2}").text)
    assert engine.generate("Choose: ", choice=["yes", "no"]).text in ("yes", "no")
    lark = 'start: "a" "b"* "c"'
    assert re.fullmatch("ab*c", engine.generate("x", grammar=lark, max_tokens=64, temperature=0.1).text)
    parts = list(engine.chat_stream("A person.", schema=schema, max_tokens=200, seed=1))
    assert set(json.loads("".join(part.text for part in parts))) == {"name", "age"}


def test_a_class_with_a_schema_is_a_schema(engine):
    class Person:
        @classmethod
        def model_json_schema(cls):
            # Without limits a small model may write digits until the answer is cut.
            age = {"type": "integer", "minimum": 0, "maximum": 150}
            return {"type": "object", "properties": {"age": age}, "required": ["age"], "additionalProperties": False}

    assert set(engine.generate("JSON: ", schema=Person, max_tokens=100).parsed()) == {"age"}


def test_chats_use_the_template(engine):
    messages = [{"role": "user", "content": "Tell a tale."}]
    text, ids = engine.chat_prompt(messages)
    assert "Tell a tale." in text
    assert engine.chat_prompt("Tell a tale.") == (text, ids)
    answer = engine.chat(messages, max_tokens=12, logprobs=0, **GREEDY)
    assert answer.message == {"role": "assistant", "content": answer.text}
    assert answer.usage.prompt_tokens == len(ids)
    assert len(answer.logprobs) == len(answer.token_ids)
    parts = list(engine.chat_stream(messages, max_tokens=12, **GREEDY))
    assert "".join(part.text for part in parts) == answer.text


def test_required_tools_are_called(engine):
    tool = {
        "type": "function",
        "function": {
            "name": "weather",
            "parameters": {
                "type": "object",
                "properties": {"days": {"type": "integer", "minimum": 1, "maximum": 14}},
                "required": ["days"],
                "additionalProperties": False,
            },
        },
    }
    answer = engine.chat("Weather?", tools=[tool], tool_choice="required", parallel_tool_calls=False, max_tokens=200)
    assert answer.finish_reason == "tool_calls"
    (call,) = answer.tool_calls
    assert call.name == "weather" and isinstance(call.parsed()["days"], int)
    # The calls of two answers have different ids.
    other = engine.chat("Weather?", tools=[tool], tool_choice="required", parallel_tool_calls=False, max_tokens=200)
    assert other.tool_calls[0].id != call.id
    parts = list(engine.chat_stream("Weather?", tools=[tool], tool_choice="required", max_tokens=200, seed=3))
    deltas = [delta for part in parts for delta in part.tool_calls]
    assert deltas[0].name == "weather"
    first = "".join(delta.arguments for delta in deltas if delta.index == 0)
    assert isinstance(json.loads(first)["days"], int)


def test_a_batch_runs_together_and_equals_each_alone(engine):
    alone = [engine.generate(prompt, max_tokens=20, seed=number) for number, prompt in enumerate(PROMPTS)]
    passes = engine.statistics()["engine"]["generate_passes"]
    requests = [{"prompt": prompt, "seed": number} for number, prompt in enumerate(PROMPTS)]
    together = engine.batch(requests, max_tokens=20)
    assert [answer.token_ids for answer in together] == [answer.token_ids for answer in alone]
    while engine.statistics()["running"]:
        time.sleep(0.01)
    assert engine.statistics()["engine"]["generate_passes"] - passes < 4 * 20
    chats = engine.batch([{"messages": "Tell a tale.", "max_tokens": 3}, "A fox"], max_tokens=5, **GREEDY)
    assert [len(answer.token_ids) for answer in chats] == [3, 5]


def test_a_failed_request_of_a_batch_is_an_exception_in_its_place(engine):
    requests = ["A fox", {"prompt": "x", "temperature": -1}, [1, 10**6], "word " * 2000]
    answers = engine.batch(requests, max_tokens=4, return_exceptions=True)
    assert isinstance(answers[0], forebay.Answer)
    assert all(isinstance(answer, forebay.OptionError) for answer in answers[1:])
    assert "temperature" in str(answers[1]) and "context" in str(answers[3])
    with pytest.raises(forebay.OptionError):
        engine.batch(requests, max_tokens=4)
    assert asyncio.run(engine.abatch(["A fox"], max_tokens=4))[0].usage.completion_tokens == 4


def test_32_streams_of_an_event_loop_equal_each_alone(engine):
    wanted = [(PROMPTS[number % len(PROMPTS)], 12 + number % 9, number) for number in range(32)]
    alone = [engine.generate(prompt, max_tokens=most, seed=seed, logprobs=1) for prompt, most, seed in wanted]

    async def one(prompt, most, seed, after):
        stream = engine.astream(prompt, max_tokens=most, seed=seed, logprobs=1)
        ids = []
        async for part in stream:
            if part.token_id is not None:
                ids.append(part.token_id)
            if after is not None and len(ids) == after:
                await stream.aclose()
                return ids, None
        return ids, stream.answer

    async def all_of_them():
        tasks = []
        for number, of in enumerate(wanted):
            # Every third one is closed after some tokens, and every fifth one's task is cancelled.
            tasks.append(asyncio.ensure_future(one(*of, 5 if number % 3 == 0 else None)))
        await asyncio.sleep(0.05)
        for task in tasks[4::5]:
            task.cancel()
        threads = threading.active_count()
        return await asyncio.gather(*tasks, return_exceptions=True), threads

    before = threading.active_count()
    results, threads = asyncio.run(all_of_them())
    # The pool of the event loop is bounded; there is no thread for a stream.
    assert threads - before <= min(32, (os.cpu_count() or 1) + 4)
    cancelled = 0
    for number, (result, expected) in enumerate(zip(results, alone, strict=True)):
        if isinstance(result, asyncio.CancelledError):
            assert number % 5 == 4
            cancelled += 1
            continue
        ids, answer = result
        if answer is None:
            assert ids == expected.token_ids[:5]
        else:
            assert ids == expected.token_ids and answer.logprobs == expected.logprobs
            assert answer.text == expected.text
    assert cancelled > 0
    # The engine has nothing left to do.
    until = time.monotonic() + 10
    while (engine.statistics()["running"], engine.statistics()["waiting"]) != (0, 0):
        assert time.monotonic() < until, "cancelled requests go on"
        time.sleep(0.02)


def idle(engine):
    until = time.monotonic() + 10
    while (state := engine.statistics())["running"] or state["waiting"]:
        assert time.monotonic() < until, "a request goes on"
        time.sleep(0.01)
    return state["engine"]["generated_tokens"]


def test_closed_and_dropped_requests_end_in_the_engine(engine):
    before = idle(engine)
    with engine.stream(PROMPTS[0], max_tokens=400, **GREEDY) as stream:
        next(stream)
    assert list(stream) == []
    with pytest.raises(forebay.EngineError, match="not ended"):
        _ = stream.answer
    for part in engine.stream(PROMPTS[0], max_tokens=400, **GREEDY):
        assert part.token_id is not None
        break
    gc.collect()

    async def timed_out():
        with pytest.raises(asyncio.TimeoutError):
            await asyncio.wait_for(engine.agenerate(PROMPTS[0], max_tokens=400, **GREEDY), 0.02)
        stream = engine.achat_stream(PROMPTS[0], max_tokens=400, **GREEDY)
        async for _ in stream:
            break
        del stream

    asyncio.run(timed_out())
    assert idle(engine) - before < 800


def test_several_event_loops_and_threads_at_once(engine):
    expected = engine.generate(PROMPTS[3], max_tokens=16, **GREEDY).token_ids
    found, errors = [], []

    def in_loop():
        async def some():
            many = [engine.agenerate(PROMPTS[3], max_tokens=16, **GREEDY) for _ in range(4)]
            return [answer.token_ids for answer in await asyncio.gather(*many)]

        try:
            found.extend(asyncio.run(some()))
        except Exception as error:
            errors.append(error)

    threads = [threading.Thread(target=in_loop) for _ in range(4)]
    [thread.start() for thread in threads]
    found.append(engine.generate(PROMPTS[3], max_tokens=16, **GREEDY).token_ids)
    [thread.join() for thread in threads]
    assert not errors and found == [expected] * 17


def test_the_gil_is_free_while_a_call_waits(engine):
    count = 0
    stop = threading.Event()

    def counts():
        nonlocal count
        while not stop.wait(0.001):
            count += 1

    thread = threading.Thread(target=counts)
    thread.start()
    started = time.monotonic()
    engine.generate(PROMPTS[0], max_tokens=100, **GREEDY)
    seconds = time.monotonic() - started
    stop.set()
    thread.join()
    assert count > 20 * seconds


def test_ctrl_c_ends_a_request(engine):
    def interrupts():
        time.sleep(0.3)
        os.kill(os.getpid(), signal.SIGINT)

    old = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        threading.Thread(target=interrupts).start()
        with pytest.raises(KeyboardInterrupt):
            engine.batch(PROMPTS * 20, max_tokens=400, **GREEDY)
    finally:
        signal.signal(signal.SIGINT, old)
    idle(engine)
    assert engine.generate(PROMPTS[0], max_tokens=2).token_ids


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"temperature": 3}, "temperature must be between"),
        ({"logprobs": 21}, "logprobs"),
        ({"max_tokens": 0}, "max_tokens must be at least 1"),
        ({"heat": 1}, "there is no option 'heat'"),
        ({"tools": []}, "there is no option 'tools'"),
        ({"schema": {}, "regex": "a"}, "exclude each other"),
        ({"regex": "("}, "structured_outputs|response_format|regex"),
        ({"stop": ""}, "empty"),
        ({"stop": ["x"] * 17}, "16 texts"),
        ({"top_p": "high"}, "top_p must be a number"),
    ],
)
def test_wrong_options_are_errors(engine, options, words):
    with pytest.raises(forebay.OptionError, match=words):
        engine.generate("x", **options)


def test_wrong_prompts_are_errors(engine):
    for prompt in ("", [], [-1], 5, ["a"], None):
        with pytest.raises(forebay.OptionError):
            engine.generate(prompt)
    with pytest.raises(forebay.OptionError, match="too short|context"):
        engine.generate([5] * 600)
    for messages in ([], [{"content": "x"}], [{"role": "user", "content": 5}]):
        with pytest.raises(forebay.OptionError):
            engine.chat(messages)


@pytest.fixture
def library(tmp_path, monkeypatch):
    """A model library that has one model, `tales`."""
    folder = tmp_path / "library"
    folder.mkdir()
    (folder / "tales.gguf").symlink_to(MODEL)
    monkeypatch.setenv("FOREBAY_MODELS", str(folder))
    return folder


def test_a_model_of_the_library_opens_by_its_name(library, tmp_path, monkeypatch):
    for name in ("tales", "tales.gguf"):
        with forebay.Engine(name, device="cpu", context=128, threads=1) as engine:
            assert engine.generate("Once", max_tokens=2, **GREEDY).usage.completion_tokens == 2
    with pytest.raises(FileNotFoundError, match="no such file or folder, and the model library") as missing:
        forebay.Engine("no-such-tale", device="cpu")
    assert missing.value.filename == "no-such-tale" and str(library) in str(missing.value)
    with pytest.raises(FileNotFoundError, match="that program has no such model"):
        forebay.Engine("ollama:no-such-tale", device="cpu")
    # A path that exists is a path, even if a model has the same name.
    monkeypatch.chdir(tmp_path)
    (tmp_path / "tales").write_bytes(b"no model")
    with pytest.raises(forebay.FormatError):
        forebay.Engine("tales", device="cpu")


def test_plans_take_names_of_models(library):
    pytest.importorskip("numpy", reason="results are arrays of NumPy")
    profile = ROOT / "crates/forebay-engine/tests/profiles/epyc-2core.json"
    assert forebay.plan("tales", profile=profile, device="cpu", ram="1GiB", context=512).context == 512
    with pytest.raises(FileNotFoundError, match="model library"):
        forebay.plan("no-such-tale", profile=profile, device="cpu")
    with pytest.raises(FileNotFoundError, match="model library"):
        forebay.assess("no-such-tale", device="cpu")


def test_models_that_cannot_be_opened(tmp_path):
    with pytest.raises(FileNotFoundError):
        forebay.Engine(tmp_path / "none.gguf")
    (tmp_path / "bad.gguf").write_bytes(b"GGUF" + bytes(20))
    with pytest.raises(forebay.FormatError, match="bad.gguf"):
        forebay.Engine(tmp_path / "bad.gguf")
    for options in (
        {"device": "gpu"}, {"kv_type": "f8"}, {"context": 0}, {"policy": "best"}, {"ram": "much"}, {"max_latency": 0},
        {"context": 10**7},
    ):  # fmt: skip
        with pytest.raises(forebay.OptionError):
            forebay.Engine(MODEL, **({"device": "cpu"} | options))
    with pytest.raises(forebay.OutOfMemoryError, match="KiB|MiB|bytes"):
        forebay.Engine(MODEL, device="cpu", ram="1KiB", context=64)


def test_progress_may_end_a_load():
    seen = []
    with forebay.Engine(MODEL, device="cpu", context=64, progress=lambda *of: seen.append(of)):
        pass
    assert seen[-1][0] == seen[-1][1] > 0

    def fails(done, total):
        raise LookupError("enough")

    with pytest.raises(LookupError, match="enough"):
        forebay.Engine(MODEL, device="cpu", context=64, progress=fails)


def test_a_closed_engine_ends_its_requests():
    engine = forebay.Engine(MODEL, device="cpu", context=512, parallel=2)
    expected = engine.generate("A fox", max_tokens=4, **GREEDY)
    stream = engine.stream("A fox", max_tokens=400, **GREEDY)
    next(stream)
    engine.close()
    engine.close()
    with pytest.raises(forebay.EngineError):
        list(stream)
    with pytest.raises(forebay.EngineError, match="closed"):
        engine.generate("x")
    with pytest.raises(forebay.EngineError, match="closed"):
        engine.statistics()
    assert expected.text


def test_a_small_budget_gives_the_same_answer(engine):
    with forebay.Engine(MODEL, device="cpu", context=512, ram="12MiB", parallel=2) as small:
        for prompt in PROMPTS[:2]:
            expected = engine.generate(prompt, max_tokens=12, **GREEDY)
            assert small.generate(prompt, max_tokens=12, **GREEDY).token_ids == expected.token_ids
        assert small.statistics()["session"]["stream"]["misses"] > 0


def test_a_full_queue_is_an_error():
    with forebay.Engine(MODEL, device="cpu", context=512, parallel=1, queue=1) as engine:
        streams = [engine.stream(PROMPTS[0], max_tokens=300, **GREEDY) for _ in range(8)]
        refused = 0
        for stream in streams[1:]:
            try:
                stream._run.take()
                time.sleep(0.05)
                stream._run.take()
            except forebay.QueueFullError:
                refused += 1
        assert refused >= 1
        [stream.close() for stream in streams]
        # A batch keeps to the queue.
        assert len(engine.batch(["A fox"] * 6, max_tokens=2)) == 6


def test_the_model_and_its_statistics(engine):
    assert engine.model["architecture"] == "qwen3moe" and engine.model["experts"] == 32
    assert (engine.context, engine.parallel) == (512, 8) and engine.load_seconds > 0
    before = idle(engine)
    answer = engine.generate(PROMPTS[0], max_tokens=10, **GREEDY)
    assert idle(engine) - before == 9, "the first token is of the prompt's pass"
    assert answer.statistics["total_seconds"] >= answer.statistics["first_token_seconds"] > 0


def test_an_assessment_and_replays_of_its_routing(tmp_path):
    numpy = pytest.importorskip("numpy", reason="results are arrays of NumPy")
    (tmp_path / "prompts.jsonl").write_text(
        "".join(json.dumps({"domain": name, "text": prompt}) + "\n" for name, prompt in
                (("tales", PROMPTS[0]), ("tales", PROMPTS[2]), ("kings", PROMPTS[1])))
    )  # fmt: skip
    trace = tmp_path / "routing.trace"
    seen = []
    assessed = forebay.assess(
        MODEL, device="cpu", context=256, prompts=tmp_path / "prompts.jsonl", tokens=24, raw=True, trace=trace,
        progress=lambda *of: seen.append(of),
    )  # fmt: skip
    assert seen and set(assessed.domains) == {"tales", "kings"} and assessed.verdict
    for curve in assessed.curves:
        assert curve.share.shape == curve.hit_rate.shape == curve.capacity_bytes.shape
        assert curve.share.dtype == numpy.float64 and curve.capacity_bytes.dtype == numpy.int64
        assert numpy.all((curve.hit_rate >= 0) & (curve.hit_rate <= 1))
    policies = ["layer-lfu", "lru", "layer-belady"]
    replayed = forebay.replay(trace, policies=policies, capacities=[0.25, "50%", "24/layer", "100MiB"])
    assert replayed.policies == policies and replayed.capacities == ["25%", "50%", "24/layer", "100MiB"]
    assert replayed.hit_rate.shape == replayed.misses.shape == (3, 4)
    assert numpy.array_equal(replayed.hit_rate, replayed.hits / replayed.lookups)
    # 100 MiB hold all experts: only first uses miss. A policy that knows the future is the best of its scope.
    assert numpy.all(replayed.hit_rate[:, 3] >= replayed.hit_rate[:, 0])
    assert numpy.all(replayed.misses[2] <= replayed.misses[0])
    assert numpy.all(numpy.diff(replayed.hit_rate[2][:3]) >= 0)
    per_token = replayed.misses / replayed.generated_tokens
    assert numpy.array_equal(replayed.generated_misses_per_token, per_token)
    both = [forebay.replay(trace, policies=["lru"], capacities=[0.5], phase=phase) for phase in ("prompt", "all")]
    assert both[0].hits + replayed.hits[1, 1] == both[1].hits
    # The same numbers as the command line.
    command = [binary(), "replay", trace, "--policy", "lru", "--capacity", "50%", "--json"]
    told = json.loads(subprocess.run(command, capture_output=True, check=True).stdout)
    counters = told["traces"][0]["replays"][0]["counters"]
    assert (counters["generate"]["hits"], counters["all"]["hits"]) == (replayed.hits[1, 1], both[1].hits[0, 0])


def test_wrong_measurements_are_errors(tmp_path):
    pytest.importorskip("numpy", reason="results are arrays of NumPy")
    (tmp_path / "no.trace").write_bytes(b"nothing")
    with pytest.raises(forebay.FormatError, match="no.trace"):
        forebay.replay(tmp_path / "no.trace")
    with pytest.raises(FileNotFoundError):
        forebay.replay(tmp_path / "none.trace")
    for options in ({"policies": ["best"]}, {"capacities": [1.5]}, {"capacities": ["x"]}, {"phase": "none"}):
        with pytest.raises(forebay.OptionError):
            forebay.replay(tmp_path / "no.trace", **options)
    with pytest.raises(forebay.OptionError, match="heat"):
        forebay.plan(MODEL, heat=1)
    with pytest.raises(FileNotFoundError):
        forebay.assess(tmp_path / "none.gguf", device="cpu")


def test_a_plan_for_a_profile(engine):
    numpy = pytest.importorskip("numpy", reason="results are arrays of NumPy")
    profile = ROOT / "crates/forebay-engine/tests/profiles/epyc-2core.json"
    planned = forebay.plan(MODEL, profile=profile, device="cpu", ram="1GiB", context=512)
    assert (planned.device, planned.context, planned.ram_bytes) == ("cpu", 512, 1 << 30)
    # Caches hold most of this model, so nothing is predicted.
    assert planned.tokens_per_second is None and "too small" in planned.uncertain_because
    assert planned.limit == "cpu" and planned.sequences[0] == 1
    assert planned.together_tokens_per_second.dtype == numpy.float64
    assert planned.together_tokens_per_second.shape == planned.sequences.shape
    command = [binary(), "plan", MODEL, "--profile", profile, "--device", "cpu", "--ram", "1GiB", "--ctx", "512"]
    told = json.loads(subprocess.run([*command, "--json"], capture_output=True, check=True).stdout)
    for name in ("plan", "other", "one_more_gib", "together", "machine", "best_sequences"):
        assert planned.document[name] == told[name], name
    small = engine.plan(profile=profile, ram="8MiB")
    assert small.ram_bytes == 8 << 20 and small.document["plan"]["host"]["fully_resident"] is False
