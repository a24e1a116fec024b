#!/usr/bin/env python3
"""Checks the OpenAPI document of a running `forebay serve`.

    bench/openapi-check.py [ADDRESS]

ADDRESS is http://127.0.0.1:8080 unless given. Needs the package openapi-spec-validator, which checks the document against the
schema of OpenAPI 3.1. Exit status 1 if the document is wrong.
"""

import json
import sys
import urllib.request

from openapi_spec_validator import OpenAPIV31SpecValidator

ADDRESS = sys.argv[1] if len(sys.argv) > 1 else "http://127.0.0.1:8080"

with urllib.request.urlopen(ADDRESS + "/openapi.json") as answer:
    document = json.load(answer)
errors = list(OpenAPIV31SpecValidator(document).iter_errors())
for error in errors:
    print("/".join(str(part) for part in error.absolute_path), error.message[:300], sep=": ")
operations = [operation for item in document["paths"].values() for operation in item.values()]
ids = [operation["operationId"] for operation in operations]
twice = sorted({name for name in ids if ids.count(name) > 1})
for name in twice:
    print("operationId is not unique:", name)
print(f"OpenAPI {document['openapi']}: {len(operations)} operations, {len(document['components']['schemas'])} schemas,",
      f"{len(errors) + len(twice)} errors")
sys.exit(1 if errors or twice else 0)
