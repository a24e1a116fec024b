"""Answers many prompts on several machines or GPUs with Ray Data: a file of prompts in, a folder of answers out.

    pip install ./python "ray[data]"
    python examples/ray_data.py model.gguf prompts.jsonl answers/ --gpus 1 --engines 2

Each line of prompts.jsonl is an object with "prompt" (text), or "messages" (a conversation). The answers have all fields of their
line, and "answer", "finish_reason" and "tokens". If an answer fails, "error" says why, and the others go on.

Each actor is one engine with the model in its own memory, and answers its batches by continuous batching. If a machine is lost, Ray
starts its actors and the batches that they had again on other machines: no prompt is lost, and greedy answers are the same.
`model` must be on every machine under the same path. docs/ray.md tells how the same runs on KubeRay.
"""

import argparse
import os

import forebay
import numpy
import ray


class Answers:
    """An actor: one engine."""

    def __init__(self, model: str, engine: dict, request: dict) -> None:
        self.engine = forebay.Engine(model, **engine)
        self.request = request

    def __call__(self, batch: dict[str, numpy.ndarray]) -> dict[str, numpy.ndarray]:
        kind = "messages" if "messages" in batch else "prompt"
        requests = [{kind: plain(content)} for content in batch[kind]]
        answers = self.engine.batch(requests, return_exceptions=True, **self.request)
        failed = [isinstance(answer, Exception) for answer in answers]
        rows = list(zip(answers, failed, strict=True))
        # Ray moves columns of text as arrays of objects.
        return {
            **batch,
            "answer": objects("" if fail else answer.text for answer, fail in rows),
            "finish_reason": objects("" if fail else answer.finish_reason for answer, fail in rows),
            "tokens": numpy.array([0 if fail else answer.usage.completion_tokens for answer, fail in rows], numpy.int64),
            "error": objects(str(answer) if fail else "" for answer, fail in rows),
        }


def plain(content):
    """Return lists for the arrays that Ray makes of conversations."""
    if isinstance(content, numpy.ndarray):
        return [plain(entry) for entry in content]
    return str(content) if isinstance(content, str) else content


def objects(texts) -> numpy.ndarray:
    texts = list(texts)
    column = numpy.empty(len(texts), dtype=object)
    column[:] = texts
    return column


def answered(
    prompts: ray.data.Dataset,
    model: str,
    engine: dict,
    request: dict,
    *,
    gpus: float = 0,
    cpus: float = 1,
    engines: int = 1,
    batch: int = 64,
) -> ray.data.Dataset:
    """Return the prompts with their answers. Nothing runs before the rows are used."""
    return prompts.map_batches(
        Answers,
        fn_constructor_args=(model, engine, request),
        batch_size=batch,
        compute=ray.data.ActorPoolStrategy(size=engines),
        num_gpus=gpus or None,
        num_cpus=None if gpus else cpus,
        # Actors that are lost with their machine start again elsewhere, as often as it takes.
        max_restarts=-1,
        max_task_retries=-1,
    )


def main() -> None:
    parser = argparse.ArgumentParser(description="Answers a file of prompts with Ray Data.")
    parser.add_argument("model", help="GGUF file, pack or folder, at the same path on every machine")
    parser.add_argument("prompts", help='JSON lines with "prompt" or "messages"')
    parser.add_argument("answers", help="folder for the answers, which must not exist")
    parser.add_argument("--vram", help='VRAM of an engine, such as "8GiB"')
    parser.add_argument("--ram", help="RAM of an engine for weights")
    parser.add_argument("--context", type=int, help="positions of context of a request")
    parser.add_argument("--max-tokens", type=int, default=512, help="tokens of an answer at most (512)")
    parser.add_argument("--temperature", type=float, default=0.0, help="temperature of sampling (0, which is greedy)")
    parser.add_argument("--gpus", type=float, default=0, help="GPUs of an engine (0)")
    parser.add_argument("--cpus", type=float, default=1, help="processors of an engine (1)")
    parser.add_argument("--engines", type=int, default=1, help="engines (1)")
    parser.add_argument("--batch", type=int, default=64, help="prompts that an engine gets at a time (64)")
    given = parser.parse_args()
    if os.path.exists(given.answers):
        parser.error(f"{given.answers} exists")
    engine = {
        "vram": given.vram,
        "ram": given.ram,
        "context": given.context,
        "device": "cuda" if given.gpus else "cpu",
        "threads": None if given.gpus else max(int(given.cpus), 1),
    }
    request = {"max_tokens": given.max_tokens, "temperature": given.temperature}
    answers = answered(
        ray.data.read_json(os.path.abspath(given.prompts), lines=True),
        given.model,
        engine,
        request,
        gpus=given.gpus,
        cpus=given.cpus,
        engines=given.engines,
        batch=given.batch,
    )
    answers.write_json(os.path.abspath(given.answers))


if __name__ == "__main__":
    main()
