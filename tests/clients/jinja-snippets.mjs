// Small templates: one list that names every feature, and a generator of random ones.
export const variables = {
  name: 'Ada',
  empty: '',
  text: '  Hello, wörld! Straße ΟΔΟΣ\n second-line\tx ',
  n: 7,
  zero: 0,
  neg: -3,
  f: 2.5,
  big: 9007199254740993n.toString() * 1,
  yes: true,
  no: false,
  nothing: null,
  list: [3, 1, 2],
  words: ['b', 'A', 'c', 'a', 'B'],
  mixed: [1, 'two', 3.5, null, true, [1, 2], { k: 'v' }],
  nested: [[1, 2], [3, [4]], []],
  map: { b: 1, a: 'x', items: 'shadow', 'two words': 2, n: null },
  users: [
    { name: 'Zoe', age: 30, city: 'Ulm', tags: ['x', 'y'], active: true },
    { name: 'ada', age: 25, city: 'Bonn', tags: [], active: false },
    { name: 'Bob', age: 30, city: 'ulm', tags: ['z'], active: true },
  ],
  tree: [{ v: 1, kids: [{ v: 2, kids: [] }, { v: 3, kids: [{ v: 4, kids: [] }] }] }, { v: 5, kids: [] }],
  html: '<a href="x">T & t\'s</a> <!-- c --> &lt;',
};

const expressions = `
1 + 2 * 3 - 4 // 3 % 2 ** 3|-7 // 2|-7 % 3|7 % -3|7.5 // 2|-7.5 % 2|2 ** 3 ** 2|2 ** -1|-2 ** 2|10 / 4|10 / 5|1e3|1_000|0x1f|0b101|0o17|1.5e-7|1e16|1e15|123456789.125|0.1 + 0.2
1 / 3|100 * 1.1|3.0|1e100|-0.0|5 // 0|1 / 0|1.0 % 0|'a' ~ 1 ~ none ~ true ~ [1]|'a' + 'b'|'a' + 1|'a' * 3|3 * 'ab'|[1] * 2|[1] + [2]|(1,) + (2,)|'x' 'y' "z"|true + true|-true|+true|+'a'|-'a'
1 < 2 < 3|1 < 3 < 2|1 == 1.0|1 == true|'1' == 1|none == false|[1, 2] == [1, 2]|(1, 2) == [1, 2]|{'a': 1} == {'a': 1.0}|'a' < 'b'|'a' < 1|[1, 2] < [1, 3]|1 != 2|none < 1|2 >= 2 > 1
1 in [1, 2]|'a' in 'abc'|'a' not in map|'b' in map|1 in 'abc'|none in [none]|1 in none|2 not in list|'x' in undefined_thing|1.0 in [1]|[1] in [[1]]|1 in range(3)|'k' in nothing
not 1|not not ''|1 and 0|0 or 'x'|1 or undefined_thing.x|none or 0|'a' if yes else 'b'|'a' if no|('a' if no) is defined|1 if 0 else 2 if 0 else 3|not 1 == 2|no or yes and no
[1, 2, 3,]|(1,)|()|(1, 2)|{}|{'a': 1, "b": [1, (2,)], 3: none, 1.5: true}|{'a': 1,}|[]|[[]]|['it\\'s', "q\\"", 'both\\'"', '\\n\\t\\\\', 'é', '\\x07', '\\u2028', '\\U0001F600', '\\101', '\\q']
list[0]|list[-1]|list[5]|list[1:]|list[:-1]|list[::-1]|list[::2]|list[5:1]|list[1:2:1]|text[2:5]|text[::-1]|'wörld'[1]|'wörld'[-3:]|'abc'[9]|'abc'[::0]|(1, 2, 3)[::-2]|list['x']|list[1.0]|list[true]|range(10)[2:5]
map.b|map['items']|map.items|map['two words']|map.missing|map.missing.deeper|map[none]|map[[1]]|nothing.x|nothing['x']|n.x|'abc'.x|users[0].name|users.0.name|users[0]['tags'][1]|undefined_thing|undefined_thing.x|undefined_thing['x']|undefined_thing()|map.__class__|''.__class__|name._private
map.get('a')|map.get('q')|map.get('q', 5)|map.keys()|map.values()|map.items()|map.keys()|map.copy()|map.pop('a')|map.update({})|map.clear|list.append(1)|list.append|list.sort()|list.index(1)|list.index(9)|list.count(3)|(1, 1).count(1)|list.copy()
dict(a=1, b=2)|dict({'x': 1}, y=2)|dict([('a', 1)])|range(5)|range(1, 9, 3)|range(5, 0, -2)|range(0)|range(3)[1]|range(1.5)|range(1, 5)|list(range(3))|namespace(a=1).a|namespace(a=1).b|namespace({'q': 2}).q
undefined_thing + 1|1 + undefined_thing|undefined_thing == undefined_other|undefined_thing == none|undefined_thing != 1|undefined_thing < 1|undefined_thing ~ 'x'|-undefined_thing|undefined_thing[1:]|[undefined_thing]|{'a': undefined_thing}|not undefined_thing|undefined_thing in [1]|'%s' % undefined_thing|undefined_thing * 2
'%s is %d' % ('x', 3)|'%05.1f|' % 2.25|'%-5s|%5s|' % ('a', 'b')|'%x %X %o %#x' % (255, 255, 8, 255)|'%(a)s' % {'a': 1}|'%c%%' % 'x'|'%r %s' % ('a', 'a')|'%d' % 'a'|'%s %s' % 'a'|'%s' % (1, 2)|'%+d % d %e' % (1, 2, 1234.5)|'%g %g' % (1e10, 0.0001)|'%5.2s|' % 'abc'|'%s' % [1]|'%i' % 2.9|'%*d' % (5, 3)
'{} {}'.format(1, 'a')|'{0} {1} {0}'.format('a', 'b')|'{x} {y[0]} {z.name}'.format(x=1, y=[2], z=users[0])|'{:>5}|{:<5}|{:^5}|'.format('a', 'b', 'c')|'{:05d} {:,} {:x} {:b} {:.2f} {:e} {:%}'.format(42, 1234567, 255, 5, 3.14159, 12345.678, 0.25)|'{:*^9}'.format('m')|'{!r:>6}'.format('a')|'{{}}'.format()|'{}'.format()|'{'.format()|'{:d}'.format('a')|'{:+.1f}'.format(2.55)|'{:{w}}|'.format('x', w=4)|'{:10.3}|'.format('abcdef')|'{0.__class__}'.format(1)|'{:_}'.format(1234567)|'{:#x}'.format(255)|'{:08.3f}'.format(-3.14159)|'{:g}'.format(1e-5)|'{:.3}'.format(2.0)
'aXbXc'.split('X')|'aXbXc'.split('X', 1)|' a  b '.split()|' a  b c '.split(none, 1)|'aXbXc'.rsplit('X', 1)|' a  b c '.rsplit(none, 1)|''.split()|''.split(',')|'a'.split('')|'a,b'.split(',', maxsplit=1)|'abc'.split(none)|'a-b'.partition('-')|'a-b-c'.rpartition('-')|'abc'.partition('-')
' x '.strip()|'xxaxx'.strip('x')|'xyaz'.lstrip('xy')|'axyz'.rstrip('zy')|'\u3000x\u00a0'.strip()|'\\x1cx\\x85'.strip()|'abc'.startswith('a')|'abc'.endswith(('x', 'c'))|'abc'.startswith('b', 1)|'abc'.startswith(1)|'abc'.endswith('')|'hello'.find('l')|'hello'.rfind('l')|'hello'.find('z')|'hello'.index('z')|'hello'.count('l')|'hello'.count('')|'wörld'.find('l')|'hello'.find('l', 3)|'hello'.find('', 9)|'aaa'.count('aa')
'a\\nb\\r\\nc\\x0bd'.splitlines()|'a\\n'.splitlines(true)|'-'.join(['a', 'b'])|'-'.join([1])|'-'.join('abc')|'aaa'.replace('a', 'b', 2)|'abc'.replace('', '-')|'abc'.replace('a', 1)|'abc'.removeprefix('ab')|'abc'.removesuffix('bc')|'7'.zfill(3)|'-7'.zfill(4)|'a'.center(4)|'a'.center(5, '*')|'ab'.center(5)|'a'.ljust(3) ~ '|'|'a'.rjust(3)|'a\\tb'.expandtabs(4)|'Ab'.swapcase()
'straße'.upper()|'ΟΔΟΣ'.lower()|'ΑΣ ΣΑ'.lower()|'hello wörld'.title()|"they're ok".title()|'ﬁx'.capitalize()|'ǆa'.title()|'İ'.lower()|'HELLO'.capitalize()|'ß'.casefold()|'abc'.isalpha()|'ab1'.isalnum()|'12'.isdigit()|'²'.isdigit()|'²'.isdecimal()|'½'.isnumeric()|' \\t'.isspace()|''.isspace()|'Ab'.isupper()|'AB1'.isupper()|'ab'.islower()|'Ab Cd'.istitle()|'a_1'.isidentifier()|'é'.isascii()
`;

const filters = `
name|upper;text|lower;text|title;'foo bar-baz (x'|title;text|capitalize;text|trim;'xax'|trim('x');text|length;list|length;map|count;n|length;nothing|length;undefined_thing|length;words|join;words|join(', ');mixed|join('-');users|join(', ', attribute='name');list|join(1)
list|first;list|last;[]|first;[]|last;'abc'|first;'abc'|last;map|first;undefined_thing|first;users|map(attribute='name')|first;list|sum;users|sum(attribute='age');users|sum('age', 100);words|sum;nested|sum(start=[]);[]|sum;[1.5, 2]|sum
list|min;list|max;words|min;words|max;words|max(case_sensitive=true);users|max(attribute='age');[]|max;[1, 'a']|max;list|sort;words|sort;words|sort(case_sensitive=true);words|sort(true);list|sort(reverse=true);users|sort(attribute='age')|map(attribute='name')|list;users|sort(attribute='age,name')|map(attribute='name')|list;users|sort(attribute='city', reverse=true)|map(attribute='name')|join(',');mixed|sort;map|sort
list|reverse|list;'abc'|reverse;map|reverse|list;words|unique|list;words|unique(case_sensitive=true)|list;users|unique(attribute='age')|map(attribute='name')|list;nested|unique|list;list|list;'abc'|list;map|list;n|list;undefined_thing|list;map|items|list;map|dictsort;map|dictsort(by='value');{'b': 2, 'A': 1}|dictsort;{'b': 1, 'A': 2}|dictsort(true);{'b': 1, 'A': 2}|dictsort(by='value', reverse=true);undefined_thing|items|list;list|items|list
words|map('upper')|list;words|map('replace', 'a', 'z')|join;users|map(attribute='tags.0')|list;users|map(attribute='zip', default='none')|list;list|map('nofilter')|list;list|map|list;undefined_thing|map('upper')|list;list|select('odd')|list;list|reject('odd')|list;mixed|select|list;mixed|reject|list;mixed|select('string')|list;users|selectattr('active')|map(attribute='name')|list;users|rejectattr('active')|map(attribute='name')|list;users|selectattr('age', 'gt', 26)|map(attribute='name')|list;users|selectattr('city', 'equalto', 'Ulm')|list|length;users|selectattr('zip', 'undefined')|list|length;list|select('divisibleby', 3)|list;list|select('>', 1)|list;list|select('in', [1, 2])|list
list|batch(2)|list;list|batch(2, 'x')|list;[]|batch(2)|list;range(10)|slice(3)|list;range(10)|slice(3, '-')|list;users|groupby('age');users|groupby('city')|map(attribute='grouper')|list;users|groupby('city', case_sensitive=true)|map(attribute=0)|list;users|groupby('zip', default='q');users|groupby('age')|map(attribute='list')|map('length')|list
undefined_thing|default('d');undefined_thing|d;empty|default('d');empty|default('d', true);nothing|default('d');nothing|default('d', boolean=true);map.missing|default(1 + 1);no|d('x', true);(-5)|abs;-5|abs;2.5|abs;'a'|abs;2.5|round;3.5|round;2.675|round(2);42.55|round(1, 'floor');42.1|round(0, 'ceil');42|round;1234|round(-2);42.5|round(method='x');7|round(1);1250.0|round(-2)
'42'|int;' 42 '|int;'4x'|int;'4x'|int(9);'42.9'|int;'0x1f'|int(base=16);'1f'|int(0, 16);'0b11'|int(base=0);nothing|int;list|int;2.9|int;-2.9|int;yes|int;'1_0'|int;'-3'|int;'1e3'|int;'4.5'|float;'x'|float;'x'|float(1.5);'inf'|float;3|float;nothing|float;'1e3'|float;undefined_thing|int;'٣'|int
5|string;nothing|string;yes|string;list|string;2.0|string;map|string;undefined_thing|string;'a'|string;text|replace('l', 'L');text|replace('l', 'L', 2);5|replace(5, 6);'abc'|replace('', '.');'a\\nb\\n\\nc'|indent;'a\\nb\\n\\nc'|indent(2, true);'a\\nb\\n\\nc'|indent(2, blank=true);'a\\nb'|indent('>> ');n|indent;'a'|center(5);'abc'|center;'word count é_1 x-y'|wordcount;'Hello wörld this is long'|truncate(11);'Hello wörld this is long'|truncate(11, true);'Hello wörld this is long'|truncate(11, false, '..', 0);'short'|truncate(4);'x'|truncate(1)
'a long line of words to be wrapped at some width'|wordwrap(12);'abcdefghijklmnop qr'|wordwrap(5);'abcdefghijklmnop qr'|wordwrap(5, false);'one-two-three four-five'|wordwrap(6);'a b'|wordwrap(1, wrapstring='/');'para one\\n\\npara two is longer'|wordwrap(10)
1000|filesizeformat;1|filesizeformat;0|filesizeformat;123456789|filesizeformat;1024|filesizeformat(true);123456789|filesizeformat(binary=true);'%s-%s'|format(1, 2);'%(a)s'|format(a=3);'%s'|format;'%d'|format('x');html|striptags;html|escape;html|e|e;html|forceescape;html|safe;(html|safe) ~ '<';('<b>'|safe) + '<';'<' + ('<b>'|safe);'a b/c?ü&'|urlencode;{'a b': 'c/d', 'e': 1}|urlencode;[('x', 'y z')]|urlencode;{'a': 'x"', 'b': none, 'c': 1}|xmlattr;{'a': 1}|xmlattr(false);{'a b': 1}|xmlattr
map|tojson;mixed|tojson;html|tojson;text|tojson;text|tojson(true);map|tojson(indent=2);[]|tojson(indent=2);{}|tojson(indent=2);nested|tojson(indent=1);map|tojson(separators=(',', ':'));map|tojson(sort_keys=true);undefined_thing|tojson;(1, 2)|tojson;1.0|tojson;1e100|tojson;{'a': {'b': [1, {'c': none}]}}|tojson(indent=4);{1: 2, none: 3, true: 4, 1.5: 5}|tojson;range(3)|tojson;'\\x7f\\x01/'|tojson;users|tojson(indent='--');nothing|tojson;map|items|tojson;'é𝄞'|tojson(ensure_ascii=true)
map|attr('b');map|attr('keys') is callable;name|attr('upper') is callable;users[0]|attr('name');'x'|nofilter;name|random_thing;map|pprint;{'z': 1, 'a': {'y': 2, 'b': 3}}|pprint;list|pprint;name|upper|lower|title;-1|abs;n|string|length;name|length + 1;'a' ~ name|upper;(name ~ 'x')|upper;list|map('string')|join|length;[1,2]|map('float')|list;words|join('')|list|length
`;

const tests = `
n is odd;n is even;n is divisibleby 7;n is divisibleby(2);n is defined;undefined_thing is defined;undefined_thing is undefined;map.x is undefined;nothing is none;nothing is not none;yes is boolean;no is false;yes is true;1 is true;1 is integer;true is integer;1.0 is float;n is number;true is number;'a' is number;'abc' is lower;'ABC' is upper;'1' is lower;5 is lower;name is string;('a'|safe) is string;n is string;map is mapping;list is mapping;list is sequence;name is sequence;map is sequence;n is sequence;list is iterable;name is iterable;n is iterable;nothing is iterable;undefined_thing is iterable;undefined_thing is sequence;range is callable;name is callable;nothing is sameas none;n is sameas 7;'a' is sameas 'a';('a'|e) is escaped;'a' is escaped
1 is in [1, 2];1 is not in [1, 2];'a' is in 'abc';n is eq 7;n is equalto(7);n is == 7;n is ne 8;n is gt 3;n is greaterthan 3;n is ge 7;n is lt 3;n is lessthan 9;n is le 7;'a' is lt 1;'upper' is filter;'nope' is filter;'odd' is test;n is notest;n is odd and n is not even;n is odd or x;(n is odd) == true;not n is odd;n is divisibleby 7 and yes;'a' is odd;map.items is callable;list is not string and list is iterable;[] is sequence;(list|map('upper')) is sequence;(list|map('upper')) is iterable;(map|items) is mapping;loop is defined;1.5 is odd;n is integer if yes else 0
`;

const statements = [
  '{% if n > 5 %}big{% elif n > 3 %}mid{% else %}small{% endif %}',
  '{% if undefined_thing %}a{% endif %}b{% if not undefined_thing %}c{% endif %}',
  '{% for x in list %}{{ x }}{% if not loop.last %}, {% endif %}{% endfor %}',
  '{% for x in list %}{{ loop.index }}{{ loop.index0 }}{{ loop.revindex }}{{ loop.revindex0 }}{{ loop.first }}{{ loop.last }}{{ loop.length }}{{ loop.depth }}{{ loop.depth0 }};{% endfor %}',
  '{% for x in list %}{{ loop.previtem }}<{{ x }}>{{ loop.nextitem }} {{ loop.previtem is defined }}{{ loop.nextitem is defined }};{% endfor %}',
  '{% for x in [1,1,2,2,1] %}{{ loop.changed(x) }}{{ loop.cycle("a", "b") }} {% endfor %}',
  '{% for x in list if x > 1 %}{{ x }}:{{ loop.index }}/{{ loop.length }}{{ loop.last }} {% else %}none{% endfor %}',
  '{% for x in list if x > 9 %}{{ x }}{% else %}none{{ loop is defined }}{% endfor %}',
  '{% for x in [] %}{% else %}empty{% endfor %}',
  '{% for k, v in map.items() %}{{ k }}={{ v }};{% endfor %}{% for k in map %}{{ k }}{% endfor %}{% for k, v in map|items %}{{ k }}{{ v }}{% endfor %}',
  '{% for a, (b, c) in [(1, (2, 3)), [4, "56"]] %}{{ a }}{{ b }}{{ c }}{% endfor %}',
  '{% for a, b in [1] %}{{ a }}{% endfor %}',
  '{% for a, b in [[1]] %}{{ a }}{% endfor %}',
  '{% for a, b in [[1, 2, 3]] %}{{ a }}{% endfor %}',
  '{% for x in nothing %}{% endfor %}',
  '{% for x in 5 %}{% endfor %}',
  '{% for x in undefined_thing %}{{ x }}{% else %}e{% endfor %}',
  '{% for c in "añ" %}[{{ c }}]{% endfor %}',
  '{% for x in list %}{% if x == 1 %}{% continue %}{% endif %}{{ x }}{% if x == 2 %}{% break %}{% endif %}{% endfor %}',
  '{% for x in list %}{% break %}{% else %}never{% endfor %}',
  '{% for n in tree recursive %}{{ n.v }}@{{ loop.depth }}{% if n.kids %}({{ loop(n.kids) }}){% endif %}{% endfor %}',
  '{% for x in list %}{{ loop([1]) }}{% endfor %}',
  '{% for x in list %}{% for y in list %}{{ loop.index }}{% endfor %}-{{ loop.index }} {% endfor %}',
  '{% for x in list %}{% set outer = loop %}{% for y in [1, 2] %}{{ outer.index }}.{{ loop.index }} {% endfor %}{% endfor %}',
  '{% set x = 1 %}{% for i in list %}{% set x = x + i %}{{ x }} {% endfor %}{{ x }}',
  '{% if yes %}{% set x = 1 %}{% endif %}{{ x }}',
  '{% if no %}{% set n = 1 %}{% endif %}{{ n }}',
  '{% set ns = namespace(t=0) %}{% for i in list %}{% set ns.t = ns.t + i %}{% endfor %}{{ ns.t }}{{ ns.q is defined }}',
  '{% set map.b = 3 %}',
  '{% set ns = namespace() %}{% set ns.a = 1 %}{% set ns.b = ns.a + 1 %}{{ ns.b }}{{ ns["b"] }}',
  '{% set a, b = 1, 2 %}{{ a }}{{ b }}{% set (c, d) = "xy" %}{{ c }}{{ d }}{% set e = 1, %}{{ e }}',
  '{% set a, b = 1 %}',
  '{% set x %}  block {{ n }} {% endset %}[{{ x }}]{% set y | upper | trim %} a {% endset %}[{{ y }}]',
  '{% set x %}{% set inner = 1 %}{{ inner }}{% endset %}{{ x }}{{ inner is defined }}',
  '{{ n }}{% set n = n + 1 %}{{ n }}',
  '{% for i in [1] %}{{ n }}{% endfor %}{% set n = 5 %}{{ n }}',
  '{% macro m() %}{{ n }}{% endmacro %}{{ m() }}{% set n = 2 %}{{ m() }}',
  '{% for i in [1, 2] %}{{ q }}{% set q = i %}{{ q }}{% endfor %}{{ q is defined }}',
  '{% for i in [1, 2] %}{% set n = n + i %}{{ n }} {% endfor %}',
  '{% for i in [1, 2] %}{% if i == 2 %}{% set n = 0 %}{% endif %}{{ n }}{% endfor %}',
  '{% for i in [1] %}{% set n = 0 %}{% for j in [1] %}{{ n }}{% set n = 9 %}{{ n }}{% endfor %}{{ n }}{% endfor %}{{ n }}',
  '{% macro m(a, b=2, c=a) %}[{{ a }}|{{ b }}|{{ c }}]{% endmacro %}{{ m(1) }}{{ m(1, c=3) }}{{ m(b=5, a=4) }}{{ m() }}{{ m(1, 2, 3) }}',
  '{% macro m(a) %}{{ varargs }}{{ kwargs }}{{ a }}{% endmacro %}{{ m(1, 2, 3, x=4) }}{{ m() }}',
  '{% macro m(a) %}{{ a }}{% endmacro %}{{ m(1, 2) }}',
  '{% macro m(a) %}{{ a }}{% endmacro %}{{ m(q=2) }}',
  '{% macro m(a) %}{{ a }}{% endmacro %}{{ m(1, a=2) }}',
  '{% macro m(a, b) %}{{ a }}{{ b }}{% endmacro %}{{ m(*[1, 2]) }}{{ m(**{"a": 3, "b": 4}) }}{{ m(1, *[2]) }}{{ m(1, **{"b": 5}) }}',
  '{% macro m() %}{{ caller() }}!{% endmacro %}{% call m() %}body {{ n }}{% endcall %}',
  '{% macro m(x) %}{{ caller(x, 2) }}{% endmacro %}{% call(a, b=5) m(1) %}{{ a }}{{ b }}{% endcall %}',
  '{% macro m() %}no caller{% endmacro %}{% call m() %}x{% endcall %}',
  '{% macro m() %}{{ caller is defined }}{{ caller() }}{% endmacro %}{{ m() }}',
  '{% macro m() %}{{ caller is defined }}{% endmacro %}{{ m() }}',
  '{% macro m() %}{% set z = 1 %}{{ z }}{% endmacro %}{{ m() }}{{ z is defined }}',
  '{% macro a() %}A{{ b() }}{% endmacro %}{% macro b() %}B{% endmacro %}{{ a() }}',
  '{% macro f(k) %}{{ k }}{% if k %}{{ f(k - 1) }}{% endif %}{% endmacro %}{{ f(5) }}',
  '{% macro m(a, b=1) %}{{ caller }}{% endmacro %}{{ m.name }}{{ m.catch_kwargs }}{{ m.catch_varargs }}{{ m.caller }}',
  '{% for i in list %}{% macro m() %}{{ i }}{% endmacro %}{{ m() }}{% endfor %}',
  '{% filter upper %}a{{ name }}{% endfilter %}{% filter replace("a", "b")|upper %}banana{% endfilter %}',
  '{% with %}{% set a = 1 %}{{ a }}{% endwith %}{{ a }}',
  '{% with a = 1, b = n %}{{ a }}{{ b }}{% endwith %}{{ a is defined }}',
  '{% with a = 1, b = a %}{{ b }}{% endwith %}',
  '{% with n = 2 %}{{ n }}{% endwith %}{{ n }}',
  '{% raw %}{{ x }} {% if %} {# #}{% endraw %}|{% raw -%}  a  {%- endraw %}|',
  'a {# comment {{ x }} #} b{#- strip -#} c\n{# line #}\nd',
  'a\n  {% if yes %}\n  b\n  {% endif %}\nc\n',
  'a\n  {%+ if yes %}\n  b\n  {%+ endif +%}\nc',
  'a  {%- if yes -%}  b  {%- endif -%}  c',
  'a  {{- n -}}  b\n\n{{ n }}\n\n',
  'x {% if yes %} y {% endif %} z\n  {{ n }}\n{% if yes %}\n\n  q{% endif %}',
  '\n\n{% set x = 1 %}\n\n{{ x }}\n',
  'a\r\nb\rc{{ "x\r\ny" }}',
  '   {# c #}   \n  {% raw %}\n r \n  {% endraw %}\n  t',
  '{% generation %}x{{ n }}{% set g = 1 %}{% endgeneration %}{{ g is defined }}',
  '{% autoescape false %}{{ html }}{% endautoescape %}',
  '{% block title %}t{{ n }}{% endblock %}',
  '{% set c = cycler("a", "b") %}{{ c.next() }}{{ c.next() }}{{ c.next() }}{{ c.current }}{{ c.reset() }}{{ c.next() }}',
  '{% set j = joiner("|") %}{{ j() }}a{{ j() }}b{{ j() }}c{% set k = joiner() %}{{ k() }}{{ k() }}',
  '{{ raise_exception("boom " ~ n) }}',
  '{% if no %}{{ raise_exception("x") }}{% endif %}fine',
  '{% if no %}{{ n|nofilter }}{% endif %}soft',
  '{% for x in [] %}{{ n|nofilter }}{% endfor %}hard',
  '{{ 1 if yes else n|nofilter }}',
  '{{ n is nosuchtest }}',
  '{% for x in list|sort %}{{ x }}{% endfor %}{% for x in list[::-1] %}{{ x }}{% endfor %}{% for x in (1, 2) %}{{ x }}{% endfor %}{% for x in 1, 2 %}{{ x }}{% endfor %}',
  '{% for x in list if no else %}{% endfor %}',
  '{% if (n > 5 and yes) or no %}y{% endif %}{% if 1, 2 %}t{% endif %}',
  '{% for u in users if u.active %}{{ loop.index }}{{ u.name }}{% if loop.nextitem is defined %}>{{ loop.nextitem.name }}{% endif %}{% endfor %}',
  '{% set ns = namespace(go=true) %}{% for x in [1, 2, 3] if ns.go %}{{ x }}{% if x == 2 %}{% set ns.go = false %}{% endif %}{% endfor %}',
  '{% set it = list|map("string") %}{{ it|join }}{{ it|join }}|{% if list|select("gt", 9) %}always{% endif %}',
  '{% set it = users|selectattr("active") %}{% for u in it %}{{ u.name }}{{ loop.length }}{% endfor %}',
  '{% for u in users|groupby("age") %}{{ u.grouper }}:{{ u.list|length }} {% endfor %}{% for a, b in users|groupby("age") %}{{ a }}{{ b|length }}{% endfor %}',
  '{{ {"a": 1}.a }}{{ {"a": {"b": [1, 2]}}.a.b[1] }}{{ "x".upper() }}{{ [1, 2]|length }}{{ (1, 2)[0] }}{{ {"a": {}} }}',
  '{{ "a" if n == 7 }}{{ ("a" if n == 8)|default("z") }}',
  '{{ n,  }}{{ 1, 2 }}',
  '{{ [1, 2,\n 3] }}{{\n n\n}}',
  '{% set x = {"k": [1, {"z": 2}]} %}{{ x["k"][1]["z"] }}{{ x.k[0] }}',
  '{{ name.upper().lower()[0:2] * 2 ~ "!" }}',
  '{{ 5.real }}',
  '{{ "%s" % (1,) }}{{ "a%%b" % () }}',
  '{{ loop }}|{{ loop is defined }}',
  '{% for x in list %}{% if x == 1 %}{% continue %}{% endif %}{% break %}{% else %}else{% endfor %}',
  '{% for x in list %}{% if x == 2 %}{% continue %}{% endif %}{{ x }}{% else %}else{% endfor %}',
  '{{', '{% if %}', '{% endif %}', '{% for %}', '{{ 1 + }}', '{{ ) }}', '{{ (1 }}', '{% if yes %}', '{% foo %}', '{{ "unclosed }}', '{# open', '{% set 1 = 2 %}', '{% set none = 2 %}', '{% for loop in list %}{% endfor %}', '{{ a b }}', '{% raw %}x', '{{ 01 }}', '{{ $ }}', '{% macro m(a=1, b) %}{% endmacro %}', '{% do n %}', '{{ n | }}', '{{ n is }}', '{% include "x" %}', '{% extends "x" %}', '{{ [1, 2 }}', '{{ n..x }}', '{% break %}', '{% call n %}{% endcall %}', '{{ f(a=1, 2) }}', '{{ f(a=1, a=2) }}', '{% with a %}{% endwith %}', '{% else %}', '{{ {1} }}',
  '}} %} #} plain { } {x',
  '{{ "{{ not }}" }}{{ \'{% x %}\' }}{{ "}}" }}',
  '{% if n == 7 -%}\n   yes\n{%- endif %}\n\n  end',
  '{{-n-}}{{- -n -}}{{ +n }}',
  '{{ 3 .real if false else 4 }}',
  '{{ users[0].tags is sequence and users[0].tags is not string }}{{ users|length > 2 and users[0].name == "Zoe" }}',
  '{{ ["a", "b"] | map("upper") | join("+") ~ ("!" if yes else "?") }}',
  '{{ messages is defined and messages[0].role == "system" }}',
  '{%- for u in users -%}\n{{ u.name }}\n{%- if not loop.last -%}, {% endif -%}\n{%- endfor -%}',
  '{{ 2 * 3 ~ 4 + 5 }}', '{{ 1 ~ 2 * 3 }}', '{{ not yes ~ "x" }}', '{{ -n|abs }}', '{{ -2|abs }}', '{{ 2 ** 0.5 }}', '{{ 4 ** 0.5 }}', '{{ (1, 2) in [(1, 2)] }}', '{{ n in (7, 8) }}', '{{ 7 // 2 * 2 + 7 % 2 == 7 }}', '{{ "abc"|upper in "xABCx" }}', '{{ 10 - 2 - 3 }}', '{{ 2 - -2 }}', '{{ n if n else 0 + 1 }}',
];

export function fixedSnippets() {
  const out = [];
  const add = (template) => out.push({ name: template, template, variables });
  // Columns are separated by '|' (expressions, where no '|' occurs alone inside) or ';'.
  for (const line of expressions.trim().split('\n')) for (const e of splitOutside(line, '|')) add(`{{ ${e} }}`);
  for (const line of `${filters.trim()}\n${tests.trim()}`.split('\n')) for (const e of splitOutside(line, ';')) add(`{{ ${e} }}`);
  statements.forEach(add);
  return out;
}

// Splits at a separator outside of string literals.
function splitOutside(line, separator) {
  const parts = [''];
  let quote = '';
  for (let i = 0; i < line.length; ++i) {
    const c = line[i];
    if (quote && c === '\\') {
      parts[parts.length - 1] += c + line[++i];
      continue;
    }
    if (quote ? c === quote : c === '"' || c === "'") quote = quote ? '' : c;
    if (c === separator && !quote) parts.push('');
    else parts[parts.length - 1] += c;
  }
  return parts;
}

// --- random ones --------------------------------------------------------------------------------------------------------------
const names = ['name', 'empty', 'text', 'n', 'zero', 'neg', 'f', 'yes', 'no', 'nothing', 'list', 'words', 'mixed', 'nested', 'map', 'users', 'html', 'undefined_thing', 'x', 'y', 'i', 'loop', 'ns.v'];
const literals = ['0', '1', '2', '-1', '3.5', '1e3', '"a"', "'b c'", '"é漢"', 'true', 'false', 'none', '[]', '[1, "x"]', '{}', '{"a": 1, "b": [2]}', '(1, 2)', 'range(4)', '"%s"', '" pad "', '"a,b,c"', '"x\\ny"'];
const binaries = ['+', '-', '*', '/', '//', '%', '~', '~', '==', '!=', '<', '<=', '>', '>=', 'in', 'not in', 'and', 'or'];
const filterCalls = ['upper', 'lower', 'title', 'capitalize', 'trim', 'length', 'count', 'first', 'last', 'list', 'string', 'int', 'float', 'abs', 'round', 'round(1)', 'sum', 'min', 'max', 'sort', 'sort(reverse=true)', 'unique|list', 'reverse|list', 'join', 'join("-")', 'default("d")', 'd(1, true)', 'replace("a", "ä")', 'tojson', 'tojson(indent=2)', 'indent(2)', 'batch(2)|list', 'slice(2)|list', 'items|list', 'dictsort', 'e', 'safe', 'urlencode', 'wordcount', 'center(9)', 'truncate(6)', 'wordwrap(7)', 'map("string")|join("+")', 'map(attribute="name")|list', 'select|list', 'reject("none")|list', 'selectattr("age")|list|length', 'groupby("age")|length', 'striptags', 'pprint', 'filesizeformat', 'format(1)', 'attr("upper") is defined', 'map("upper")|list', 'sort(attribute="age")|map(attribute="name")|list', 'xmlattr', 'select("string")|join'];
const testCalls = ['defined', 'undefined', 'none', 'string', 'number', 'integer', 'float', 'boolean', 'true', 'false', 'mapping', 'sequence', 'iterable', 'odd', 'even', 'divisibleby(2)', 'lower', 'upper', 'in [1, "a"]', 'eq 1', 'gt(1)', 'sameas none', 'callable', 'escaped'];
const methods = ['.upper()', '.strip()', '.split()', '.split(",")', '.startswith("a")', '.endswith("d")', '.replace("l", "_")', '.get("a")', '.get("q", 3)', '.items()|list', '.keys()|list', '.values()|list', '.title()', '.find("a")', '.count("l")', '.rsplit(" ", 1)', '.isdigit()', '.splitlines()', '.join(words)', '.name', '.a', '["b"]', '[0]', '[-1]', '[1:]', '[::-1]', '[:2]', '.index("a")', '.lstrip(" H")', '.append(1)', '.removeprefix("A")', '.zfill(9)', '.capitalize()', '.format(1)', '[n]', '.age'];

function expression(r, depth) {
  if (depth <= 0 || r.chance(0.2)) return r.chance(0.55) ? r.pick(names) : r.pick(literals);
  const sub = () => expression(r, depth - 1);
  switch (r.below(11)) {
    case 0: case 1: return `${sub()} ${r.pick(binaries)} ${sub()}`;
    case 2: return `(${sub()})`;
    case 3: case 4: return `${sub()}|${r.pick(filterCalls)}`;
    case 5: {
      const method = r.pick(methods);
      // Jinja2 folds constants, and a slice of a constant that has none is undefined then, an error otherwise.
      return method.includes(':') ? r.pick(names) + method : `(${sub()})${method}`;
    }
    case 6: return `${r.pick(names)}${r.pick(methods)}`;
    case 7: return `${sub()} is ${r.chance(0.3) ? 'not ' : ''}${r.pick(testCalls)}`;
    case 8: return `${sub()} if ${sub()}${r.chance(0.8) ? ` else ${sub()}` : ''}`;
    case 9: return r.chance(0.5) ? `not ${sub()}` : `[${sub()}, ${sub()}]`;
    default: return r.chance(0.5) ? `{"k": ${sub()}}` : `m(${sub()}${r.chance(0.4) ? `, ${r.chance(0.5) ? 'b=' : ''}${sub()}` : ''})`;
  }
}

const sign = (r) => (r.chance(0.2) ? '-' : '');
const tag = (r, text) => `{%${sign(r)} ${text} ${sign(r)}%}`;
const space = (r) => r.pick(['', '', ' ', '\n', '\n  ', ' t ', '\n\n']);

function statement(r, depth) {
  const e = (d = 2) => expression(r, d);
  const body = () => block(r, depth - 1);
  if (depth <= 0) return `{{${sign(r)} ${e()} ${sign(r)}}}`;
  switch (r.below(12)) {
    case 0: case 1: return tag(r, `if ${e()}`) + body() + (r.chance(0.3) ? tag(r, `elif ${e()}`) + body() : '') + (r.chance(0.5) ? tag(r, 'else') + body() : '') + tag(r, 'endif');
    case 2: case 3: return tag(r, `for ${r.pick(['x', 'i', 'y'])} in ${r.pick(['list', 'words', 'mixed', 'users', 'range(3)', 'map', '"ab"', 'nested', e(1)])}${r.chance(0.2) ? ` if ${e(1)}` : ''}`) + body() + (r.chance(0.2) ? tag(r, r.pick(['break', 'continue'])) : '') + (r.chance(0.3) ? '{{ loop.index }}{{ loop.last }}{{ loop.previtem }}' : '') + (r.chance(0.2) ? tag(r, 'else') + body() : '') + tag(r, 'endfor');
    case 4: return tag(r, `for x, y in ${r.pick(['map|items', 'map.items()', 'nested', 'users|groupby("age")', '[[1, 2], "ab"]'])}`) + body() + tag(r, 'endfor');
    case 5: case 6: return tag(r, `set ${r.pick(['x', 'y', 'n', 'ns.v'])} = ${e(3)}`);
    case 7: return tag(r, `set ${r.pick(['x', 'y'])}${r.chance(0.3) ? ' | upper' : ''}`) + body() + tag(r, 'endset');
    case 8: return tag(r, `with ${r.pick(['x', 'n'])} = ${e()}`) + body() + tag(r, 'endwith');
    case 9: return tag(r, `filter ${r.pick(['upper', 'trim', 'length', 'replace("a", "b")|lower'])}`) + body() + tag(r, 'endfilter');
    case 10: return tag(r, `call m(${e(1)})`) + body() + tag(r, 'endcall');
    default: return tag(r, `macro m(a, b=${e(1)})`) + body() + '{{ a }}{{ b }}' + (r.chance(0.5) ? '{{ caller() if caller is defined }}' : '') + tag(r, 'endmacro');
  }
}

function block(r, depth) {
  let out = space(r);
  for (let n = 1 + r.below(3); n > 0; --n) out += (r.chance(0.6) ? `{{${sign(r)} ${expression(r, 2)} ${sign(r)}}}` : statement(r, depth)) + space(r);
  return out;
}

export function randomSnippet(r) {
  const head = '{% set ns = namespace(v=1) %}{% macro m(a, b=2) %}<{{ a }}|{{ b }}{{ caller() if caller is defined }}>{% endmacro %}';
  return { template: head + block(r, 2), variables };
}
