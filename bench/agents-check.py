#!/usr/bin/env python3
"""Runs Codex CLI and Claude Code against `forebay serve` with a tiny random model, and checks that each completes its session.

    bench/agents-check.py FOREBAY VOCABULARY TEMPLATE [--bin FOLDER]

FOREBAY is the program, VOCABULARY a GGUF with a GPT-2 vocabulary (fixtures/vocab, unpacked), TEMPLATE a chat template of Qwen3.
FOLDER has the programs `codex` and `claude` of the npm packages @openai/codex and @anthropic-ai/claude-code; a program that is not there
is skipped, which the output says. Needs the packages gguf and numpy. The model writes nonsense and ends its answers at random, so what
is checked is the protocol: the prompts have some 10,000 tokens with tools, the answers come in events, and no client reports an error.
Exit status 1 if a session failed.
"""

import argparse
import json
import os
import pathlib
import re
import shutil
import subprocess
import sys
import tempfile

import gguf
import numpy

parser = argparse.ArgumentParser()
parser.add_argument("forebay")
parser.add_argument("vocabulary")
parser.add_argument("template")
parser.add_argument("--bin", default="")
arguments = parser.parse_args()

HIDDEN, LAYERS, CONTEXT = 64, 2, 65536
CONFIG = """model = "tiny"
model_provider = "forebay"
[model_providers.forebay]
name = "forebay"
base_url = "http://{address}/v1"
wire_api = "responses"
"""


def write_model(path):
    """Writes a random llama whose answers have some 20 tokens: one value of every embedding is large and leads to the end."""
    fields = gguf.GGUFReader(arguments.vocabulary).fields

    def values(name):
        field = fields["tokenizer.ggml." + name]
        is_text = field.types[-1] == gguf.GGUFValueType.STRING
        return [bytes(field.parts[at]) if is_text else int(field.parts[at][0]) for at in field.data]

    marks = [b"<|im_start|>", b"<|im_end|>", b"<tool_call>", b"</tool_call>", b"<think>", b"</think>"]
    tokens = values("tokens") + marks
    end = len(tokens) - 5
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_context_length(CONTEXT)
    writer.add_embedding_length(HIDDEN)
    writer.add_block_count(LAYERS)
    writer.add_feed_forward_length(2 * HIDDEN)
    writer.add_head_count(4)
    writer.add_head_count_kv(2)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_rope_freq_base(1e6)
    writer.add_rope_dimension_count(HIDDEN // 4)
    writer.add_vocab_size(len(tokens))
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("gpt-2")
    writer.add_token_list(tokens)
    writer.add_token_types(values("token_type") + [3, 3, 4, 4, 4, 4])
    writer.add_token_merges(values("merges"))
    writer.add_eos_token_id(end)
    writer.add_add_bos_token(False)
    writer.add_chat_template(pathlib.Path(arguments.template).read_text())
    random = numpy.random.default_rng(1)

    def tensor(name, *shape):
        return name + ".weight", (random.standard_normal(shape) * 0.05).astype(numpy.float32)

    name, embedding = tensor("token_embd", len(tokens), HIDDEN)
    embedding[:, 0] = 0.5
    writer.add_tensor(name, embedding)
    name, head = tensor("output", len(tokens), HIDDEN)
    head[end, 0] = 1.3
    writer.add_tensor(name, head)
    writer.add_tensor("output_norm.weight", numpy.ones(HIDDEN, numpy.float32))
    shapes = {"attn_q": (HIDDEN, HIDDEN), "attn_k": (HIDDEN // 2, HIDDEN), "attn_v": (HIDDEN // 2, HIDDEN),
              "attn_output": (HIDDEN, HIDDEN), "ffn_gate": (2 * HIDDEN, HIDDEN), "ffn_up": (2 * HIDDEN, HIDDEN),
              "ffn_down": (HIDDEN, 2 * HIDDEN)}
    for layer in range(LAYERS):
        for name, shape in shapes.items():
            writer.add_tensor(*tensor(f"blk.{layer}.{name}", *shape))
        for name in ("attn_norm", "ffn_norm"):
            writer.add_tensor(f"blk.{layer}.{name}.weight", numpy.ones(HIDDEN, numpy.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def program(name):
    found = pathlib.Path(arguments.bin, name) if arguments.bin else None
    return str(found) if found and found.exists() else shutil.which(name)


def run(command, folder, environment):
    """Runs a program, and returns its status and what it wrote. A program that takes too long has no status."""
    try:
        ran = subprocess.run(command, cwd=folder, env={**os.environ, **environment}, stdin=subprocess.DEVNULL, capture_output=True,
                             text=True, timeout=300)
        return ran.returncode, ran.stdout, ran.stderr
    except subprocess.TimeoutExpired as late:
        text = lambda part: (part or b"").decode(errors="replace")
        return None, text(late.stdout), text(late.stderr) + "\nit took more than 300 seconds"


failed = False
# Codex refuses a home below the folder of temporary files.
with tempfile.TemporaryDirectory(dir=pathlib.Path.home()) as folder:
    model = os.path.join(folder, "tiny.gguf")
    write_model(model)
    server = subprocess.Popen([arguments.forebay, "serve", model, "--name", "tiny", "--device", "cpu", "--ctx", "60000", "--parallel", "2",
                               "--port", "0"], stderr=subprocess.PIPE, text=True)
    try:
        address = next(found[1] for line in server.stderr if (found := re.search(r"answers at http://([^,\s]+)", line)))
        pathlib.Path(folder, "config.toml").write_text(CONFIG.format(address=address))
        alone = os.path.join(folder, "alone")
        os.mkdir(alone)
        sessions = {
            "codex": (["exec", "--skip-git-repo-check", "--json", "Say hello"], {"CODEX_HOME": folder}),
            # Codex's own local mode asks for Ollama's version and list of models first.
            "codex --oss": (["exec", "--oss", "--local-provider", "ollama", "-m", "tiny", "--skip-git-repo-check", "--json", "Say hello"], {
                "CODEX_HOME": alone, "CODEX_OSS_BASE_URL": f"http://{address}/v1"}),
            "claude": (["-p", "Say hello", "--output-format", "json"], {
                "ANTHROPIC_BASE_URL": f"http://{address}", "ANTHROPIC_API_KEY": "none", "ANTHROPIC_MODEL": "tiny",
                "ANTHROPIC_SMALL_FAST_MODEL": "tiny", "CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC": "1", "HOME": folder}),
        }
        for name, (options, environment) in sessions.items():
            path = program(name.split()[0])
            if path is None:
                print(f"SKIPPED {name}: the program is not installed")
                continue
            status, out, complaints = run([path, *options], folder, environment)
            lines = [json.loads(line) for line in out.splitlines() if line.startswith("{")]
            if name.startswith("codex"):
                fine = any(line.get("type") == "turn.completed" for line in lines)
                fine = fine and not any(line.get("type") in ("error", "turn.failed") for line in lines)
                shown = lines[-1] if lines else complaints[-500:]
            else:
                fine = bool(lines) and lines[-1].get("is_error") is False
                shown = {key: lines[-1].get(key) for key in ("result", "usage")} if lines else complaints[-500:]
            fine = fine and status == 0
            failed |= not fine
            print("pass" if fine else "FAIL", name, str(shown)[:400], sep="  ")
    finally:
        server.terminate()
        server.wait()
sys.exit(failed)
