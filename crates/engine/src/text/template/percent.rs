//! Python's `%`, which formats strings too: `'%05d' % x`.
//!
//! The template engine's operator only works on numbers. So it is replaced by a filter before a template is compiled: `'%05d'|percent(x)`. A filter binds
//! more tightly than the operator, so brackets are put around a left side of more than one part: `(a * b)|percent(c)`.

const FILTER: &str = "|percent(";

/// How deeply operators may be nested in operands. Deeper ones are left to the engine, which refuses them.
const MOST_NESTED: usize = 32;

/// Words between operands that bind less tightly than `%`, or begin a statement.
const WORDS: [&str; 18] = [
    "and", "block", "call", "do", "elif", "else", "filter", "for", "if", "in", "include", "is", "macro", "not", "or",
    "print", "set", "with",
];

/// Replaces the operator by the filter in a template's source.
pub(super) fn with_filters(source: &str) -> String {
    let mut out = String::with_capacity(source.len());
    let mut at = 0;
    while let Some(found) = source[at..].find('{').map(|n| at + n) {
        let rest = &source[found..];
        let end =
            |of: &str, behind: usize| rest[behind..].find(of).map_or(source.len(), |n| found + behind + n + of.len());
        let is_raw = |tag: &str, word: &str| {
            let sign = |c: char| c == '-' || c == '+';
            tag.strip_prefix("{%").is_some_and(|t| t.trim_start_matches(sign).trim_start().starts_with(word))
        };
        // `{{-` trims white space, and negates nothing.
        let behind_sign = found + 2 + usize::from(matches!(rest.as_bytes().get(2), Some(b'-' | b'+')));
        let (copied, closes) = match rest.as_bytes().get(1) {
            Some(b'#') => (end("#}", 2), None),
            Some(b'%') if is_raw(rest, "raw") => {
                let tags = rest.match_indices("{%").map(|(n, _)| n);
                let last = tags.into_iter().find(|n| is_raw(&rest[*n..], "endraw"));
                (last.map_or(source.len(), |n| found + n + 2), None)
            }
            Some(b'%') => (behind_sign, Some("%}")),
            Some(b'{') => (behind_sign, Some("}}")),
            _ => (found + 1, None),
        };
        out.push_str(&source[at..copied]);
        at = match closes {
            Some(closes) => copied + expression(&source[copied..], Some(closes), 0, &mut out),
            None => copied,
        };
    }
    out.push_str(&source[at..]);
    out
}

/// What is known of the operands of one bracket, or of the whole expression.
#[derive(Clone, Copy, Default)]
struct Term {
    /// Where the left side of a `%` that came now would begin, in the output.
    begin: Option<usize>,
    /// An operand has ended: what comes now is an operator.
    is_complete: bool,
    /// The left side is a literal: a string needs no brackets, and a number is no format.
    literal: Option<Literal>,
}

#[derive(Clone, Copy, PartialEq)]
enum Literal {
    Text,
    Number,
}

impl Term {
    /// An operand, or a part of one, that begins here in the output.
    fn operand(&mut self, at: usize, literal: Option<Literal>) {
        self.literal = literal.filter(|_| self.begin.is_none());
        self.begin.get_or_insert(at);
        self.is_complete = true;
    }

    /// An operator that binds as tightly as `%`, or more.
    fn operator(&mut self) {
        (self.is_complete, self.literal) = (false, None);
    }
}

/// Copies an expression up to its end. Returns its length.
fn expression(code: &str, closes: Option<&str>, nested: usize, out: &mut String) -> usize {
    let bytes = code.as_bytes();
    let mut term = Term::default();
    // Of the brackets that are open, outermost first.
    let mut outer: Vec<Term> = Vec::new();
    let mut at = 0;
    while at < bytes.len() {
        let begin = at;
        match bytes[at] {
            _ if outer.is_empty() && closes.is_some_and(|closes| code[at..].starts_with(closes)) => break,
            b'%' if term.is_complete => {
                let is_number = term.literal == Some(Literal::Number);
                let is_too_deep = nested > MOST_NESTED || outer.len() > MOST_NESTED;
                let operand = blanks(bytes, at + 1);
                if let Some(start) = term.begin.filter(|_| !is_number && !is_too_deep)
                    && let end = operand_end(bytes, operand)
                    && end > operand
                {
                    let blanks_before = out.len() - out.trim_end_matches(|c: char| c.is_ascii_whitespace()).len();
                    let between = out.split_off(out.len() - blanks_before) + &code[at + 1..operand];
                    if term.literal != Some(Literal::Text) {
                        out.insert(start, '(');
                        out.push(')');
                    }
                    out.push_str(FILTER);
                    expression(&code[operand..end], None, nested + 1, out);
                    out.push(')');
                    // Keep line ends, so that line numbers stay the same.
                    out.extend(between.chars().filter(|c| *c == '\n'));
                    // Another operator may follow: `(a)|percent(b)` needs no more brackets.
                    term.literal = Some(Literal::Text);
                    at = end;
                    continue;
                }
                term.operator();
                at += 1;
            }
            b'\'' | b'"' => {
                at = text_end(bytes, at);
                term.operand(out.len(), Some(Literal::Text));
            }
            b'0'..=b'9' => {
                at = number_end(bytes, at);
                term.operand(out.len(), Some(Literal::Number));
            }
            b'(' | b'[' | b'{' => {
                term.operand(out.len(), None);
                outer.push(std::mem::take(&mut term));
                at += 1;
            }
            b')' | b']' | b'}' => {
                term = outer.pop().unwrap_or_default();
                at += 1;
            }
            // The name of an attribute or a filter.
            b'.' | b'|' => {
                term.literal = None;
                at = word_end(bytes, blanks(bytes, at + 1)).max(at + 1);
            }
            b'*' | b'/' | b'%' => {
                term.operator();
                at += 1;
            }
            b'+' | b'-' if !term.is_complete => {
                term.begin.get_or_insert(out.len());
                at += 1;
            }
            c if c.is_ascii_whitespace() => at += 1,
            c if c.is_ascii_alphanumeric() || c == b'_' || !c.is_ascii() => {
                at = word_end(bytes, at);
                if WORDS.contains(&&code[begin..at]) {
                    term = Term::default();
                } else {
                    term.operand(out.len(), None);
                }
            }
            // Operators that bind less tightly, and what separates arguments.
            _ => {
                term = Term::default();
                at += 1;
            }
        }
        out.push_str(&code[begin..at]);
    }
    at
}

/// The end of the number that begins here.
fn number_end(bytes: &[u8], at: usize) -> usize {
    at + bytes[at..].iter().take_while(|b| b.is_ascii_alphanumeric() || **b == b'.' || **b == b'_').count()
}

fn blanks(bytes: &[u8], at: usize) -> usize {
    at + bytes[at..].iter().take_while(|b| b.is_ascii_whitespace()).count()
}

fn word_end(bytes: &[u8], at: usize) -> usize {
    at + bytes[at..].iter().take_while(|b| b.is_ascii_alphanumeric() || **b == b'_' || !b.is_ascii()).count()
}

/// The end of the string literal that begins here.
fn text_end(bytes: &[u8], at: usize) -> usize {
    let quote = bytes[at];
    let mut end = at + 1;
    while end < bytes.len() && bytes[end] != quote {
        end += if bytes[end] == b'\\' { 2 } else { 1 };
    }
    let end = (end + 1).min(bytes.len());
    // A backslash before the last character must not put the end inside it.
    (end..=bytes.len()).find(|n| bytes.get(*n).is_none_or(|b| b & 0xC0 != 0x80)).unwrap_or(bytes.len())
}

/// The end of the bracket that opens here.
fn bracket_end(bytes: &[u8], mut at: usize) -> usize {
    let mut depth = 0usize;
    while at < bytes.len() {
        match bytes[at] {
            b'\'' | b'"' => {
                at = text_end(bytes, at);
                continue;
            }
            b'(' | b'[' | b'{' => depth += 1,
            b')' | b']' | b'}' => depth -= 1,
            _ => {}
        }
        at += 1;
        if depth == 0 {
            break;
        }
    }
    at
}

/// The end of an operand of `%`: signs, a value, and its attributes, subscripts, calls and filters. The start if there is no operand.
fn operand_end(bytes: &[u8], at: usize) -> usize {
    let mut begin = at;
    let mut found = at;
    loop {
        while let Some(b'-' | b'+') = bytes.get(begin) {
            begin = blanks(bytes, begin + 1);
        }
        let mut end = match bytes.get(begin) {
            Some(b'\'' | b'"') => text_end(bytes, begin),
            Some(b'(' | b'[' | b'{') => bracket_end(bytes, begin),
            Some(b'0'..=b'9') => number_end(bytes, begin),
            Some(_) => word_end(bytes, begin),
            None => begin,
        };
        if end == begin {
            return found;
        }
        let next = loop {
            let next = blanks(bytes, end);
            end = match bytes.get(next) {
                Some(b'.' | b'|') => word_end(bytes, blanks(bytes, next + 1)),
                Some(b'(' | b'[') => bracket_end(bytes, next),
                _ => break next,
            };
        };
        found = end;
        if !bytes[next..].starts_with(b"**") {
            return found;
        }
        begin = blanks(bytes, next + 2);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_the_operator_behind_a_text_becomes_a_filter() {
        for (source, expected) in [
            ("{{ '%05d' % x }}", "{{ '%05d'|percent(x) }}"),
            ("{{ \"%s\" % (a, '%}')|f(1).b[0] ~ c }}", "{{ \"%s\"|percent((a, '%}')|f(1).b[0]) ~ c }}"),
            ("{% if '%d' % -x.y == 'z' %}a % b{% endif %}", "{% if '%d'|percent(-x.y) == 'z' %}a % b{% endif %}"),
            ("{{ '%s' % '%d' % 3 }}", "{{ '%s'|percent('%d')|percent(3) }}"),
            ("{{ f('%s' % ('%d' % 3)) }}", "{{ f('%s'|percent(('%d'|percent(3)))) }}"),
            ("{{ f % x }}", "{{ (f)|percent(x) }}"),
            ("{{ (a ~ '%d') % x }}", "{{ ((a ~ '%d'))|percent(x) }}"),
            ("{{ a * -b.c[1] % x % y + z % 2 }}", "{{ (a * -b.c[1])|percent(x)|percent(y) + (z)|percent(2) }}"),
            ("{{ a|default('%d')\n %\n x }}", "{{ (a|default('%d'))|percent(x)\n\n }}"),
            ("{%- set y = f % (x, 1) -%}", "{%- set y = (f)|percent((x, 1)) -%}"),
            ("{% if not f % x == b.if % y %}", "{% if not (f)|percent(x) == (b.if)|percent(y) %}"),
            ("{{ g(f % x, k=f % y) }}", "{{ g((f)|percent(x), k=(f)|percent(y)) }}"),
            ("{{ -7 % x }}", "{{ (-7)|percent(x) }}"),
            ("{{- f % x -}}", "{{- (f)|percent(x) -}}"),
        ] {
            assert_eq!(with_filters(source), expected);
        }
        for same in [
            "{{ 7 % 2 }} '%d' % 3",
            "{% set x = 'a' %}",
            "{%- set x = 'a\\'' -%}",
            "{# {{ '%d' % 3 }} #}",
            "{% raw %}{{ '%d' % 3 }}{% endraw %}",
            "{{ {'a': {}}['a'] }}",
            "{{ '%d' %",
            "{{ 'é\\",
            "{{ '%d' % }}",
            "{",
            "{% raw",
        ] {
            assert_eq!(with_filters(same), same);
        }
        // However deep it goes, it ends.
        for part in ["'a' % (", "(a % b) % (", "1 ** ", "-", "'a' % ", "a|", "{{", "{%"] {
            let deep = format!("{{{{ 'a' % {} }}}}", part.repeat(100_000));
            assert!(with_filters(&deep).len() >= deep.len());
        }
    }
}
