"""Checks of client libraries against a server: shared by server-clients.py and server-frameworks.py. Only the standard library is needed."""

import argparse
import json
import sys

MESSAGES = [{"role": "user", "content": "Once upon a time there was"}]
SCHEMA = {"type": "object", "properties": {"legs": {"type": "integer", "minimum": 0, "maximum": 9}}, "required": ["legs"],
          "additionalProperties": False}
results = {}


def read_arguments():
    """Returns the server's address and key, and the models that are checked (None: all), from the command line."""
    parser = argparse.ArgumentParser()
    parser.add_argument("address", nargs="?", default="http://127.0.0.1:8080")
    parser.add_argument("--key", default="none")
    parser.add_argument("--models", nargs="+")
    return parser.parse_args()


def check(client, model, name, work):
    """Runs one check. It fails if `work` raises an error or returns something other than a text, a number or true."""
    try:
        shown = work()
        fine = shown is True or isinstance(shown, (str, int, float, list)) and shown not in (False, "", [])
    except Exception as error:
        shown, fine = f"{type(error).__name__}: {str(error)[:300]}", False
    passed, failures = results.setdefault((client, model), [0, []])
    results[client, model][0] = passed + fine
    if not fine:
        failures.append(name)
        print(f"FAIL  {client}, {model}: {name}: {shown!r}", flush=True)


def refused(error, work, is_right):
    """Returns true if the work ends with this kind of error, of which `is_right` says that it is the right one."""
    try:
        answer = work()
    except error as found:
        if is_right(found):
            return True
        raise AssertionError(f"another error: {found}") from found
    raise AssertionError(f"no error, but {str(answer)[:200]}")


def legs(text):
    """Returns true if a text, or what was read from one, has the form of the schema."""
    value = json.loads(text) if isinstance(text, str) else text
    return list(value) == ["legs"] and type(value["legs"]) is int and 0 <= value["legs"] <= 9


def finish(clients, names):
    """Prints a table of clients and models, and ends the program with status 1 if a check failed."""
    print("\n" + "client".ljust(18) + "".join(name.ljust(26) for name in names))
    for client in clients:
        cells = [f"{results[client, model][0]} passed, {len(results[client, model][1])} failed" for model in names]
        print(client.ljust(18) + "".join(cell.ljust(26) for cell in cells))
    failed = sum(len(failures) for _, failures in results.values())
    print(f"{failed} checks failed" if failed else "all checks passed")
    sys.exit(bool(failed))
