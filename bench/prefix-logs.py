#!/usr/bin/env python3
"""Makes logs of requests for `forebay assess MODEL --kv`.

    bench/prefix-logs.py KIND SEED OUT.jsonl

KIND is chats (30 conversations that take turns, a few more often than others), agents (25 long system prompts of different
popularity with short tasks), mixed (6 system prompts among documents that come once) or drift (40 system prompts whose popularity
moves on). The texts are random words; only how they repeat matters.
"""
import json
import random
import sys

if len(sys.argv) != 4:
    sys.exit(__doc__)
kind, seed, out = sys.argv[1], int(sys.argv[2]), sys.argv[3]
random.seed(seed)
WORDS = "harbour bread clock river bee star paper wool stone mill road night window forest king".split()
requests = []


def text(words):
    return " ".join(random.choice(WORDS) for _ in range(words))


def ask(*messages):
    messages = [{"role": role, "content": content} for role, content in messages]
    body = {"messages": messages}
    line = {"custom_id": str(len(requests)), "method": "POST", "url": "/v1/chat/completions", "body": body}
    requests.append(line)


if kind == "chats":
    system = ("system", text(90))
    conversations = [[system] for _ in range(30)]
    for _ in range(200):
        conversation = conversations[int(abs(random.gauss(0, 10))) % 30]
        conversation.append(("user", text(random.randint(10, 60))))
        ask(*conversation)
        conversation.append(("assistant", text(40)))
elif kind == "agents":
    starts = [text(random.randint(200, 700)) for _ in range(25)]
    weights = [1 / (index + 1) for index in range(25)]
    for _ in range(300):
        start = random.choices(starts, weights)[0]
        ask(("system", start), ("user", text(random.randint(5, 40))))
elif kind == "mixed":
    starts = [text(300) for _ in range(6)]
    for _ in range(300):
        if random.random() < 0.4:
            ask(("system", random.choice(starts)), ("user", text(20)))
        else:
            ask(("user", text(random.randint(100, 900))))
elif kind == "drift":
    starts = [text(400) for _ in range(40)]
    for number in range(320):
        index = number // 40 * 5 + int(abs(random.gauss(0, 3)))
        ask(("system", starts[index % 40]), ("user", text(20)))
else:
    sys.exit(f"{kind}: chats, agents, mixed or drift")
with open(out, "w") as file:
    file.writelines(json.dumps(line) + "\n" for line in requests)
