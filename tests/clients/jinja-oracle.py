"""Renders templates as Hugging Face does: one JSON object {"template", "variables"} a line in, one answer a line out.

The environment is that of transformers' chat templates: jinja2's immutable sandbox, trim_blocks and lstrip_blocks, loop controls, the
generation tag, tojson as plain json.dumps, raise_exception and strftime_now.
"""
import json
import sys
from datetime import datetime

import jinja2
from jinja2.ext import Extension, loopcontrols
from jinja2.sandbox import ImmutableSandboxedEnvironment


class Raised(Exception):
    """raise_exception() of a template."""


class Generation(Extension):
    tags = {"generation"}

    def parse(self, parser):
        lineno = next(parser.stream).lineno
        body = parser.parse_statements(["name:endgeneration"], drop_needle=True)
        return jinja2.nodes.CallBlock(self.call_method("_body"), [], [], body).set_lineno(lineno)

    def _body(self, caller):
        return caller()


def tojson(value, ensure_ascii=False, indent=None, separators=None, sort_keys=False):
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def raise_exception(message):
    raise Raised(message)


environment = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True, extensions=[Generation, loopcontrols])
environment.filters["tojson"] = tojson
environment.globals["raise_exception"] = raise_exception
environment.globals["strftime_now"] = lambda form: datetime.now().strftime(form)

compiled = {}
for line in sys.stdin:
    request = json.loads(line)
    source = request["template"]
    try:
        if source not in compiled:
            compiled[source] = environment.from_string(source)
        answer = {"ok": True, "text": compiled[source].render(**request["variables"])}
    except Raised as e:
        answer = {"ok": False, "kind": "raised", "error": str(e)}
    except jinja2.TemplateSyntaxError as e:
        answer = {"ok": False, "kind": "syntax", "error": str(e), "line": e.lineno}
    except RecursionError as e:
        answer = {"ok": False, "kind": "limit", "error": str(e)}
    except Exception as e:  # whatever Python raises in a template
        answer = {"ok": False, "kind": "runtime", "error": f"{type(e).__name__}: {e}"}
    print(json.dumps(answer))
