"""Writes jinja.json: expressions with the filters and methods that chat templates use, and what transformers' Jinja makes of them.

Run from the repository's root with the environment of tests/golden/requirements.txt.
"""

import json
import pathlib

from transformers.utils.chat_template_utils import _compile_jinja_template

HERE = pathlib.Path(__file__).parent
CONTEXT = {"n": 7, "x": 3.14159, "text": "The quick brown fox jumps over the lazy dog", "items": ["a", "b", "c"], "pair": {"k": "v", "w": 5}, "none": None, "minus": -42, "big": 12345678901234567890, "fmt": "<%03d>", "fmts": ["%d", "%s;%.1f", "%s"], "hyphens": "A well-known re-re-edit -- of state-of-the-art, x-y and 1-2 --flags a---b ---- end--start over-\tlong 'q'-word supercalifragilistic-expialidocious"}

CASES = r"""
'%05d' % n
'%5d|%-5d|%+d|% d|%i' % (n, n, n, n, n)
'%05.1f' % x
'%.2f' % x
'%.2f' % n
'%e %g %G %.3g' % (x, x, 1e-10, 1234567.0)
'%x %X %o %#x' % (255, 255, 8, 255)
'%s and %r' % ('a', 'b')
'%s' % items
'%s' % none
'%s' % (items,)
'%s %s' % (1, 1.0)
'%%' % ()
'100%% of %s' % 'it'
'%c%c' % ('a', 98)
'%10s|%-10s|%.2s' % ('ab', 'ab', 'abc')
'%(k)s=%(w)03d' % pair
'%*d' % (5, 42)
'%d' % x
'%s' % items[1]
'%s' % items | length
'%s' % items|join('+')
'%02d:%02d' % (n // 2, n % 2)
'a' ~ '%d' % n ~ 'b'
'%d' % n + 'z'
("%03d" % loop_index) if loop_index is defined else '%03d' % 1
'%s' % pair.k
'%s' % pair['k']
'%s' % 'x'.upper()
'%d%%' % -n
'%s' % '%d' % 3
'%d' % 'x'
'%d %d' % 1
'%d' % (1, 2)
'\'%s\'' % "q%s"
{'a': '%02d' % n}['a']
[ '%s' % n, '%s' % x ] | join(',')
n % 2
text|length % 5
'%05d' | format(n)
'%5.1f|%-6s|%+d' | format(x, 'a', n)
'%(a)s' | format(a=1)
'%s %s' | format('a', 'b')
'%d' | format(3.9)
'%s' | format(true)
'%x' | format(255)
'{} {}'.format(1, 'a')
'{0}{1}{0}'.format('a', 'b')
'{:05d}|{:>5}|{:<5}|{:^5}|{:.2f}'.format(n, 'a', 'b', 'c', x)
'{k}'.format(k=3)
'{:,}'.format(1234567)
'12' | int
' 12 ' | int
'12.7' | int
'-12.7' | int
'x' | int
'x' | int(5)
'x' | int(default=-1)
'' | int
none | int
none | int(3)
'ff' | int(base=16)
'0xff' | int(base=16)
'0xff' | int(0, 16)
'101' | int(0, 2)
'zz' | int(7, 16)
3.99 | int
-3.99 | int
true | int
items | int
'1_000' | int
'1e3' | int
'inf' | int
'1.5' | float
'x' | float
'x' | float(2.5)
none | float
' 2 ' | float
3 | float
'1e3' | float
items | float
'ab'.center(7)
'ab'.center(6)
'abc'.center(6, '*')
'abc'.center(2)
'ab' | center(7)
'abc' | center(8)
('ab' | center) | length
'ab'.ljust(5) ~ '|'
'ab'.rjust(5, '.')
'é'.ljust(3, 'ü')
'-42'.zfill(6)
'+7'.zfill(4)
'abc'.zfill(2)
text | truncate(20)
text | truncate(20, true)
text | truncate(20, false, '..')
text | truncate(20, true, '')
text | truncate(length=11)
text | truncate(9, leeway=0)
text | truncate(40)
text | truncate(38)
text | truncate(41, leeway=2)
'abcdefghijklmnop' | truncate(8)
'abcdefghijklmnop' | truncate(8, True, '…', 0)
text | truncate
text | truncate(2)
text | wordcount
'<p>a <b>b</b>\n  c &amp; d</p>' | striptags
'a & <b>' | escape
'a & <b>' | e
"it's they're o'neill" | title
"it's they're o'neill".title()
'hello WORLD-foo_bar 3rd'.title()
'hELLO wORLD' | capitalize
'hELLO'.capitalize()
'aBc'.swapcase()
'ßTraße'.casefold()
'ß'.upper()
'İ'.lower() | length
'abcabc'.index('c')
'abcabc'.rindex('c')
'abc'.index('z')
'abcabc'.find('c', 3)
'abcabc'.find('a', 1, 3)
'abcabc'.rfind('a')
'abcabc'.rfind('a', 0, 2)
'abcabc'.count('b', 2)
'aaa'.count('aa')
'abc'.count('')
'abc'.startswith('b', 1)
'abc'.endswith('b', 0, 2)
'abc'.startswith(('x', 'a'))
'abc'.startswith('')
'a,b,c'.rsplit(',', 1)
' a  b c '.rsplit()
' a  b c '.rsplit(none, 1)
' a  b c '.split()
' a  b c '.split(none, 1)
' a  b '.split(' ')
'a,b,c'.split(',', maxsplit=1)
'a,b,c'.split(sep=',')
''.split()
''.split(',')
'a,b,c'.split(',', 0)
'a\nb\r\nc\rd\x0be\u2028f\n'.splitlines()
'a\nb\r\nc'.splitlines(true)
''.splitlines()
'a-b-c'.partition('-')
'abc'.partition('-')
'a-b-c'.rpartition('-')
'abc'.rpartition('-')
('a-b'.partition('-')) is sequence
'x\ty'.expandtabs(4)
'ab\tc\td'.expandtabs()
'²'.isdigit()
'²'.isdecimal()
'½'.isnumeric()
'½'.isdigit()
'٣'.isdigit()
'12a'.isdigit()
''.isdigit()
'abc'.isalpha()
'ab1'.isalnum()
'a b'.isidentifier()
'a_1'.isidentifier()
'Ab Cd'.istitle()
'AB'.isupper()
'ab1'.islower()
'12'.islower()
' \t'.isspace()
''.isspace()
'a\n'.isprintable()
'ab'.isprintable()
'ab'.isascii()
'xxabxx'.strip('x')
'abcxcba'.strip('abc')
'\x1f a \x1c'.strip()
'\u200b a\u3000'.strip() | length
'a.b'.replace('.', '', 1)
'aaa'.replace('a', 'b', -1)
'abc'.replace('', '-')
'aaa'.replace('a', 'b', count=2)
'prefix'.removeprefix('pre')
'prefix'.removesuffix('fix')
'-'.join(['a', 'b'])
'-'.join('abc')
', '.join(pair)
'abc'.join([])
'a' * 3
'a'.__len__ is defined
items.index('b')
items.index('z')
items.count('a')
(1, 2, 1).count(1)
(1, 2, 1).index(2)
items.copy()
items.append('d')
pair.copy()
pair.get('z', 'd')
pair.get('z')
pair.items() | list
pair.keys() | list
pair.values() | list
pair.update({'a': 1})
pair.pop('k')
pair | dictsort
pair | dictsort(reverse=true)
{'B': 1, 'a': 2} | dictsort
{'B': 1, 'a': 2} | dictsort(case_sensitive=true)
pair | items | list
pair | length
['b', 'A', 'c'] | sort
['b', 'A', 'c'] | sort(case_sensitive=true)
['b', 'A', 'c'] | sort(true)
[3, 1, 2] | sort(reverse=True) | list
[{'a': 2}, {'a': 1}] | sort(attribute='a')
['a', 'A', 'b'] | unique | list
['a', 'A', 'b'] | unique(case_sensitive=true) | list
[1, 2, 3, 4, 5] | batch(2) | list
[1, 2, 3, 4, 5] | batch(2, 0) | list
[1, 2, 3, 4, 5] | slice(2) | list
[1, 2, 3, 4, 5] | slice(3, 'x') | list
[1, 2, 3] | sum
[1.5, 2] | sum
[{'a': 1}, {'a': 2}] | sum(attribute='a')
[1, 2] | sum(start=10)
[3, 1] | max
[3, 1] | min
['b', 'A'] | min
[] | max
[] | first
[] | last
'abc' | first
'abc' | last
'abc' | reverse
[1, 2] | reverse | list
'abc' | list
pair | list
2.5 | round
3.5 | round
2.675 | round(2)
42.55 | round(1, 'floor')
42.55 | round(1, 'ceil')
42.55 | round(-1)
5 | round
-3 | abs
-3.5 | abs
'  a ' | trim
'xxaxx' | trim('x')
'a\nb\n\nc' | indent(2)
'a\nb\n\nc' | indent(2, true)
'a\nb\n\nc' | indent(2, true, true)
'a\nb' | indent(width=3, first=true)
'a\nb' | indent('> ')
'a\r\nb' | indent
[1, 2] | join
[1, 2] | join(', ')
[{'a': 1}, {'a': 2}] | join(',', attribute='a')
[{'a': 1}, {}] | map(attribute='a', default=0) | list
['a', 'b'] | map('upper') | list
['1', '2'] | map('int') | sum
['a', 'b'] | map('replace', 'a', 'x') | list
[1, 2, 3] | select('odd') | list
[0, 1, none] | select | list
[1, 2, 3] | reject('odd') | list
[{'a': 1}, {'a': 0}, {}] | selectattr('a') | list
[{'a': 1}, {'a': 0}] | selectattr('a', 'equalto', 0) | list
[{'a': 1}, {'b': 0}] | rejectattr('a', 'defined') | list
[{'a': {'b': 1}}] | map(attribute='a.b') | list
[{'t': 'x', 'v': 1}, {'t': 'y', 'v': 2}, {'t': 'x', 'v': 3}] | groupby('t') | map('first') | list
'a' | default('b')
'' | default('b')
'' | default('b', true)
none | default('b')
none | default('b', boolean=true)
undefined_name | default('b')
undefined_name | d
undefined_name.a is defined
undefined_name ~ 'x'
undefined_name | length
'x' | string
1 | string
1.0 | string
none | string
items | string
1000 | filesizeformat
'a' is string
1 is string
none is string
'a' is iterable
1 is iterable
pair is mapping
items is mapping
items is sequence
1 is odd
2 is even
6 is divisibleby(3)
'a' is lower
'A' is upper
'a' is in ['a', 'b']
'a' is in 'abc'
1 is sameas 1
none is sameas none
true is true
1 is true
0 is false
n is eq 7
n is ge(7)
n is number
true is number
1.5 is float
1 is float
n is integer
'upper' is filter
'odd' is test
n is callable
namespace is callable
[1, 2] == [1, 2]
(1, 2) == (1, 2)
1 == 1.0
'a' < 'b'
[1] + [2]
'a' + 1
7 / 2
7 // 2
-7 // 2
7.5 // 2
-7 % 3
7.5 % 2
2 ** 10
2 ** -1
2 ** 0.5
1 / 0
10 ** 20
big
big + 1
1e16
1e15
123456789.123
0.1 + 0.2
-0.0
1e-5
100000000000000000000.0
true + 1
not items
items and 'yes'
none or 'no'
'a' if none
('a' if none) is defined
items[0:2]
items[-1]
items[5]
items[5] is defined
text[4:9]
text[::-1]
text[-3:]
text[100:]
text[0]
pair.k ~ pair['w']
pair.missing
pair.missing is defined
range(3) | list
range(2, 10, 3) | list
range(5, 0, -2) | list
dict(a=1, b=[2])
namespace(a=1).a
cycler('a', 'b').next()
joiner(', ')() ~ 'x'
['a', 'b'] | last ~ 'z'
[[1, 2], [3]] | map('sum') | list
(1, 'a')
(1,)
()
{'a': none, 1: (2,), 'b': {'c': [true]}}
'\u00e9' ~ '\x41' ~ '\\' ~ '\''
"\d"
'a' 'b'
[none, true, 1.5, "it's", "q\"q", 'tab\t']
'%s %s' % pair.items() | first
'%-4s|' % pair.k|upper
'%s' % [1, 'a']
'%s' % pair
'a' if '%d' % n == '7' else 'b'
fmt % n
(fmt ~ '!') % n
fmts[1] % (n, x)
fmts | first % n
fmts | join(' ') % (1, n, 2.5)
pair.k ~ '%d' % n
('%s' ~ 'x') % none
'%d'.upper() % n
n * 3 % 4
n % 4 * 3
-n % 4
n % -4
minus % 5
minus % -5
x % 2
-x % 2
7 % x
n % 2 == 1
not n % 2
n % 2 if n % 3 else 'none'
[n % 2, n % 3, (n + 1) % 3]
{'a': n % 5}['a']
big % 97
true % 2
n % 0
items % 2
none % 2
2 ** n % 5
2 + n % 5
n // 2 % 2
n / 2 % 2
text | wordwrap(10)
text | wordwrap(width=3)
text | wordwrap(3, false)
text | wordwrap(16, true, '|')
text | wordwrap(20, wrapstring='<br>')
hyphens | wordwrap(10)
hyphens | wordwrap(10, break_on_hyphens=false)
hyphens | wordwrap(4)
hyphens | wordwrap(5, false)
hyphens | wordwrap(1)
hyphens | wordwrap
hyphens | wordwrap(12, false, '|', false)
('  two  blanks   here ' * 3) | wordwrap(9)
('a\n\nb c d e f\n' ~ ' x') | wordwrap(3)
('Größe über-groß straße-nweit ' * 2) | wordwrap(8)
'' | wordwrap
'   ' | wordwrap(2)
n | wordwrap
text | wordwrap(0)
'a b/c?d=é&~_.-' | urlencode
pair | urlencode
[('a b', 1), ('ü/', '+&')] | urlencode
n | urlencode
none | urlencode
""".strip("\n").split("\n")


def main():
    cases = []
    for expression in CASES:
        try:
            found = {"text": _compile_jinja_template("{{ %s }}" % expression).render(**CONTEXT)}
        except Exception as error:
            found = {"error": f"{type(error).__name__}: {error}"}
        cases.append({"expression": expression, **found})
    golden = {"context": CONTEXT, "cases": cases}
    (HERE / "jinja.json").write_text(json.dumps(golden, ensure_ascii=False, separators=(",", ":")).replace('{"expression"', '\n{"expression"') + "\n")
    print(len(cases), "cases")


main()
