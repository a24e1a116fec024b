"""Answers many prompts on a Ray cluster with Ray Data: a file of prompts in, a folder of answers out.

    pip install ./python "ray[data]"
    python examples/ray_data.py model.gguf prompts.jsonl answers/ --num-gpus 1 --concurrency 2

Each line of prompts.jsonl is an object with "prompt" (text), or "messages" (a conversation). The answers have all fields of their
line, and "answer", "finish_reason" and "tokens". If an answer fails, "error" says why, and the others continue.

Each actor of the pool has one engine with the model in its own memory, and answers its batches by continuous batching. If a node is
lost, Ray restarts its actors on other nodes and retries their batches: no prompt is lost, and greedy answers are the same.
`model` must be on every node under the same path, or in the model library of every node. docs/ray.md tells how the same runs on KubeRay.
"""

import argparse
import os

import forebay
import numpy
import ray


class Answers:
    """An actor of the pool. It has one engine."""

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
    num_gpus: float = 0,
    num_cpus: float = 1,
    concurrency: int = 1,
    batch_size: int = 64,
) -> ray.data.Dataset:
    """Return the prompts with their answers. Nothing runs before the rows are used."""
    return prompts.map_batches(
        Answers,
        fn_constructor_args=(model, engine, request),
        batch_size=batch_size,
        compute=ray.data.ActorPoolStrategy(size=concurrency),
        num_gpus=num_gpus or None,
        num_cpus=None if num_gpus else num_cpus,
        # Actors that are lost with their node restart on another one, as often as it takes.
        max_restarts=-1,
        max_task_retries=-1,
    )


def main() -> None:
    parser = argparse.ArgumentParser(description="Answers a file of prompts with Ray Data.")
    parser.add_argument("model", help="GGUF file, pack or folder, at the same path on every node, or a name")
    parser.add_argument("prompts", help='JSON lines with "prompt" or "messages"')
    parser.add_argument("answers", help="folder for the answers, which must not exist")
    parser.add_argument("--vram", help='VRAM of an actor, such as "8GiB"')
    parser.add_argument("--ram", help="RAM of an actor for weights")
    parser.add_argument("--context", type=int, help="positions of context of a request")
    parser.add_argument("--max-tokens", type=int, default=512, help="tokens of an answer at most (512)")
    parser.add_argument("--temperature", type=float, default=0.0, help="temperature of sampling (0, which is greedy)")
    parser.add_argument("--num-gpus", type=float, default=0, help="GPUs of an actor (0)")
    parser.add_argument("--num-cpus", type=float, default=1, help="CPUs of an actor (1)")
    parser.add_argument("--concurrency", type=int, default=1, help="actors of the pool (1)")
    parser.add_argument("--batch-size", type=int, default=64, help="prompts of a batch (64)")
    given = parser.parse_args()
    if os.path.exists(given.answers):
        parser.error(f"{given.answers} exists")
    engine = {
        "vram": given.vram,
        "ram": given.ram,
        "context": given.context,
        "device": "cuda" if given.num_gpus else "cpu",
        "threads": None if given.num_gpus else max(int(given.num_cpus), 1),
    }
    request = {"max_tokens": given.max_tokens, "temperature": given.temperature}
    answers = answered(
        ray.data.read_json(os.path.abspath(given.prompts), lines=True),
        given.model,
        engine,
        request,
        num_gpus=given.num_gpus,
        num_cpus=given.num_cpus,
        concurrency=given.concurrency,
        batch_size=given.batch_size,
    )
    answers.write_json(os.path.abspath(given.answers))


if __name__ == "__main__":
    main()
