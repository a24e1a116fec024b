#!/usr/bin/env python3
"""Runs lm-evaluation-harness against a running `forebay serve`: its models local-completions and local-chat-completions.

    bench/lm-eval-check.py [ADDRESS] [--model NAME] [--tokenizer FOLDER] [--key KEY]

ADDRESS is http://127.0.0.1:8080 and NAME the server's first model unless given. FOLDER has the model's tokenizer.json and
tokenizer_config.json; with it, the harness counts tokens by that tokenizer (and needs the package transformers). Otherwise it counts them
by the server's, which are those of the server's first model. Needs the packages lm-eval[api] and lm-eval's program on the path or beside
this Python. Downloads nothing: the tasks are made of what the model itself writes. Takes about a minute. Exit status 1 if a check failed.

- **choice** asks how likely several continuations are. One is the model's own greedy one: the harness must find that it is, and its
  log-likelihood must be the sum of what the model reports when it is asked for one token after another.
- **text** generates until a letter, and must find the model's own answer up to that letter.
- **rolling** asks for the log-likelihood of whole texts.
"""

import argparse
import json
import os
import pathlib
import shutil
import subprocess
import sys
import tempfile
import urllib.request

parser = argparse.ArgumentParser()
parser.add_argument("address", nargs="?", default="http://127.0.0.1:8080")
parser.add_argument("--model")
parser.add_argument("--tokenizer")
parser.add_argument("--key", default="none")
arguments = parser.parse_args()

OPENINGS = ["Once upon a time", "The old king said to", "There was a small dog", "In the forest lived", "A girl went to", "The sea was",
            "Her mother told", "One day the fox"]
TASKS = {
    "choice": """task: choice
output_type: multiple_choice
doc_to_text: "{{opening}}"
doc_to_choice: "{{choices}}"
doc_to_target: "{{right}}"
target_delimiter: ""
metric_list: [{metric: acc, aggregation: mean, higher_is_better: true}]
""",
    "text": """task: text
output_type: generate_until
doc_to_text: "{{opening}}"
doc_to_target: "{{answer}}"
target_delimiter: ""
generation_kwargs: {until: ["UNTIL"], max_gen_toks: 12, temperature: 0}
metric_list: [{metric: exact_match, aggregation: mean, higher_is_better: true}]
""",
    "rolling": """task: rolling
output_type: loglikelihood_rolling
doc_to_text: ""
doc_to_target: "{{whole}}"
metric_list: [{metric: byte_perplexity}]
""",
}
UNTIL = "e"  # Most answers have one after some letters.
failed = 0


def ask(path, body=None):
    headers = {"Content-Type": "application/json", "Authorization": f"Bearer {arguments.key}"}
    data = None if body is None else json.dumps(body).encode()
    with urllib.request.urlopen(urllib.request.Request(arguments.address + path, data, headers), timeout=300) as answer:
        return json.load(answer)


model = arguments.model or ask("/v1/models")["data"][0]["id"]


def ids(text):
    return ask("/tokenize", {"model": model, "content": text})["tokens"]


def continuation(opening):
    """Returns the greedy continuation of a text, and its log-likelihood. It ends before a token that is another one when the text is read.

    Each token comes from a request of its own. Within one answer, rounding is another than in prompts, whose tokens are computed together.
    """
    text, likelihood, read = "", 0.0, ids(opening)
    for _ in range(8):
        asked = {"model": model, "prompt": read, "max_tokens": 1, "temperature": 0, "logprobs": 1}
        found = ask("/v1/completions", asked)["choices"][0]["logprobs"]
        if not found:
            break  # The model ends its answer here.
        longer = ids(opening + text + found["tokens"][0])
        if longer[:-1] != read or "\ufffd" in found["tokens"][0]:
            break
        text, likelihood, read = text + found["tokens"][0], likelihood + found["token_logprobs"][0], longer
    return (text, likelihood) if text else None


def read_whole(text, start):
    """Returns the log-likelihood of a text after a token."""
    asked = {"model": model, "prompt": [start, *ids(text)], "max_tokens": 0, "echo": True, "logprobs": 1}
    return sum(ask("/v1/completions", asked)["choices"][0]["logprobs"]["token_logprobs"][1:])


def documents(start):
    made = {opening: continuation(opening) for opening in OPENINGS}
    made = {opening: found for opening, found in made.items() if found}
    choices = list(dict.fromkeys(text for text, _ in made.values()))
    if len(choices) < 3:
        sys.exit(f"the model writes too few different texts to choose from: {choices}")
    for opening, (text, likelihood) in made.items():
        asked = {"model": model, "max_tokens": 12, "temperature": 0}
        answer = ask("/v1/completions", {**asked, "prompt": opening})["choices"][0]["text"]
        message = ask("/v1/chat/completions", {**asked, "messages": [{"role": "user", "content": opening}]})["choices"][0]["message"]
        yield {"opening": opening, "choices": choices, "right": choices.index(text), "likelihood": likelihood, "answer": answer.split(UNTIL)[0],
               "chat": (message["content"] or "").split(UNTIL)[0], "whole": opening + text,
               "read": None if start is None else read_whole(opening + text, start)}


def check(name, fine, shown=""):
    global failed
    failed += not fine
    print("pass" if fine else "FAIL", name, "" if fine else str(shown)[:600], sep="  ", flush=True)


def run(folder, name, kind, tasks, path, docs, *options, **model_arguments):
    """Runs tasks, and checks each sample."""
    out = folder / name.replace(" ", "-")
    model_arguments = {"model": model, "base_url": arguments.address + path, "max_retries": 1, **model_arguments}
    program = pathlib.Path(sys.executable).with_name("lm_eval")
    command = [str(program) if program.exists() else shutil.which("lm_eval"), "run", "--model", kind, "--include_path", str(folder / kind), "--tasks", *tasks,
               "--model_args", ",".join(f"{key}={value}" for key, value in model_arguments.items()), "--output_path", str(out), "--log_samples", *options]
    environment = {**os.environ, "OPENAI_API_KEY": arguments.key, "HF_HOME": str(folder / "cache"), "HF_HUB_OFFLINE": "1", "HF_DATASETS_OFFLINE": "1"}
    ran = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=600)
    if ran.returncode != 0:
        return check(name, False, ran.stderr[-600:])
    for task in tasks:
        [file] = out.rglob(f"samples_{task}_*.jsonl")
        samples = [json.loads(line) for line in file.read_text().splitlines()]
        wrong = [] if len(samples) == len(docs) else [f"{len(samples)} samples"]
        for sample in samples:
            doc = sample["doc"]
            if task == "choice":
                found, greedy = sample["filtered_resps"][doc["right"]]
                fine = str(greedy) == "True" and abs(float(found) - doc["likelihood"]) < 1e-3
            elif task == "text":
                found = sample["filtered_resps"][0]
                fine = sample["exact_match"] == 1 and found == doc["answer"]
            else:
                found = sample["filtered_resps"][0]
                found = found[0] if isinstance(found, list) else found
                fine = abs(float(found) - doc["read"]) < 1e-3
            if not fine:
                wrong.append((doc, sample["filtered_resps"]))
        check(f"{name}: {task}", not wrong, wrong)


def write(folder, docs):
    """Writes the tasks with their documents."""
    folder.mkdir()
    (folder / "docs.jsonl").write_text("".join(json.dumps(doc) + "\n" for doc in docs))
    data = f"dataset_path: json\ndataset_kwargs: {{data_files: {{test: {folder}/docs.jsonl}}}}\ntest_split: test\n"
    for name, text in TASKS.items():
        (folder / f"{name}.yaml").write_text(text.replace("UNTIL", UNTIL) + data)


with tempfile.TemporaryDirectory() as place:
    place = pathlib.Path(place)
    is_first = ask("/v1/models")["data"][0]["id"] == model
    start = ids(ask("/tokenizer_info")["eos_token"])[0] if is_first else None
    docs = list(documents(start))
    write(place / "local-completions", docs)
    write(place / "local-chat-completions", [{**doc, "answer": doc["chat"]} for doc in docs])
    completions, chat = "/v1/completions", "/v1/chat/completions"
    if is_first:
        run(place, "tokens", "local-completions", ["choice", "text", "rolling"], completions, docs, "--batch_size", "3")
        run(place, "texts", "local-completions", ["choice", "text"], completions, docs, tokenized_requests=False, num_concurrent=4)
    else:
        print("NOT CHECKED: the server's tokenizer, because it is that of another model")
    if arguments.tokenizer:
        run(place, "own tokenizer", "local-completions", ["choice", "text"], completions, docs, tokenizer_backend="huggingface",
            tokenizer=arguments.tokenizer, num_concurrent=2)
    else:
        print("NOT CHECKED: a tokenizer of the harness's own, because no --tokenizer is given")
    run(place, "chat", "local-chat-completions", ["text"], chat, docs, "--apply_chat_template", num_concurrent=2)
print(f"{failed} checks failed" if failed else "all checks passed")
sys.exit(bool(failed))
