"""The command line, called as a function."""

import json

from tightship import cli


def run(*args, capsys):
    status = cli.main([str(a) for a in args])
    out, err = capsys.readouterr()
    return status, out, err


def as_json(*args, capsys):
    status, out, err = run(*args, "--json", capsys=capsys)
    assert out.count("\n") == 1 and out.endswith("\n"), (out, err)
    return status, json.loads(out)
