"""Small HLO modules that can be counted by hand, and whether two modules compute the same."""

from collections.abc import Iterator

import numpy as np

from support import hlo_interpreter
from tightship.hlo import Module, parse

HEADER = "HloModule m, is_scheduled=true\n\n"
K = 1024 * 1024  # bytes of f32[512,512]


def module(text: str, header: str = HEADER) -> Module:
    return parse(header + text)


CHAIN = """ENTRY %main (p: f32[512,512]) -> f32[] {
  %p = f32[512,512]{1,0} parameter(0)
  %zero = f32[] constant(0)
  %a = f32[512,512]{1,0} tanh(%p)
  %b = f32[512,512]{1,0} exponential(%p)
  %c = f32[512,512]{1,0} multiply(%b, %b)
  %d = f32[512,512]{1,0} cosine(%c)
  ROOT %e = f32[] dot(%a, %d), lhs_contracting_dims={0,1}, rhs_contracting_dims={0,1}
}
"""


def flat(x: object) -> Iterator[bytes]:
    if isinstance(x, tuple):
        for part in x:
            yield from flat(part)
    else:
        yield np.asarray(x).tobytes()


def same_results(a: Module, b: Module) -> bool:
    given = hlo_interpreter.arguments(a)
    return list(flat(hlo_interpreter.run(a, given))) == list(flat(hlo_interpreter.run(b, given)))


LOOP = """%body (t: (s32[], f32[512,512])) -> (s32[], f32[512,512]) {
  %t = (s32[], f32[512,512]{1,0}) parameter(0)
  %n = s32[] get-tuple-element(%t), index=0
  %x = f32[512,512]{1,0} get-tuple-element(%t), index=1
  %one = s32[] constant(1)
  %m = s32[] add(%n, %one)
  %u = f32[512,512]{1,0} tanh(%x)
  %v = f32[512,512]{1,0} exponential(%x)
  %w = f32[512,512]{1,0} multiply(%v, %v)
  %z = f32[512,512]{1,0} cosine(%w)
  %y = f32[512,512]{1,0} add(%u, %z)
  ROOT %out = (s32[], f32[512,512]{1,0}) tuple(%m, %y)
}

%test (t: (s32[], f32[512,512])) -> pred[] {
  %t.1 = (s32[], f32[512,512]{1,0}) parameter(0)
  %n.1 = s32[] get-tuple-element(%t.1), index=0
  %three = s32[] constant(3)
  ROOT %less = pred[] compare(%n.1, %three), direction=LT
}

ENTRY %main (p: f32[512,512]) -> f32[] {
  %p = f32[512,512]{1,0} parameter(0)
  %zero = s32[] constant(0)
  %a = f32[512,512]{1,0} tanh(%p)
  %init = (s32[], f32[512,512]{1,0}) tuple(%zero, %a)
  %loop = (s32[], f32[512,512]{1,0}) while(%init), condition=%test, body=%body
  %r = f32[512,512]{1,0} get-tuple-element(%loop), index=1
  %row = f32[512]{0} slice(%r), slice={[0:1], [0:512]}
  ROOT %s = f32[] slice(%row), slice={[0:1]}
}
"""

COUNTING = """\
HloModule loop, is_scheduled=true

%body (p: (s32[], f32[8])) -> (s32[], f32[8]) {
  %p = (s32[], f32[8]{0}) parameter(0)
  %i = s32[] get-tuple-element(%p), index=0
  %x = f32[8]{0} get-tuple-element(%p), index=1
  %one = s32[] constant(1)
  %next = s32[] add(%i, %one)
  ROOT %t = (s32[], f32[8]{0}) tuple(%next, %x)
}

%cond (q: (s32[], f32[8])) -> pred[] {
  %q = (s32[], f32[8]{0}) parameter(0)
  %j = s32[] get-tuple-element(%q), index=0
  %ten = s32[] constant(10)
  ROOT %lt = pred[] compare(%j, %ten), direction=LT
}

ENTRY %main (a: f32[8]) -> f32[8] {
  %a = f32[8]{0} parameter(0)
  %zero = s32[] constant(0)
  %z = s32[] copy(%zero)
  %b = f32[8]{0} negate(%a)
  %init = (s32[], f32[8]{0}) tuple(%z, %b)
  %loop = (s32[], f32[8]{0}) while(%init), condition=%cond, body=%body
  ROOT %out = f32[8]{0} get-tuple-element(%loop), index=1
}
"""
"""A loop that counts, and passes an array on unchanged."""
