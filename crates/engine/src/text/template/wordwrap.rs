//! `|wordwrap`: lines broken as Python's `textwrap` breaks them.

use super::filters::given;
use super::strings::{is_decimal, is_space, lines, wrong};
use minijinja::value::{Kwargs, Rest, from_args};
use minijinja::{Error, Value};

/// How lines are broken.
struct Wrapping {
    /// Characters of a line, at most.
    width: usize,
    /// Words that are longer than a line are cut.
    cuts_words: bool,
    /// Words are broken behind hyphens.
    at_hyphens: bool,
}

/// The filter.
pub(super) fn wordwrap(value: &Value, args: Rest<Value>, named: Kwargs) -> Result<String, Error> {
    let (width, cuts_words, line_end, at_hyphens): (Option<i64>, Option<bool>, Option<String>, Option<bool>) =
        from_args(&args)?;
    let width = given(width, &named, "width")?.unwrap_or(79);
    let cuts_words = given(cuts_words, &named, "break_long_words")?.unwrap_or(true);
    let line_end = given(line_end, &named, "wrapstring")?.unwrap_or_else(|| "\n".to_owned());
    let at_hyphens = given(at_hyphens, &named, "break_on_hyphens")?.unwrap_or(true);
    named.assert_all_used()?;
    let text = value.as_str().ok_or_else(|| wrong("wordwrap: only a text has words"))?;
    let width = usize::try_from(width).ok().filter(|width| *width > 0);
    let width = width.ok_or_else(|| wrong("wordwrap: the width must be above 0"))?;
    let wrapping = Wrapping { width, cuts_words, at_hyphens };
    let wrapped = lines(text, false).into_iter().map(|line| {
        let line: Vec<char> = line.chars().collect();
        wrapping.wrap(&line).join(&line_end)
    });
    Ok(wrapped.collect::<Vec<_>>().join(&line_end))
}

/// White space between words.
fn is_blank(c: char) -> bool {
    matches!(c, '\t'..='\r' | ' ')
}

fn is_word(c: char) -> bool {
    c == '_' || c.is_alphanumeric()
}

fn is_letter(c: char) -> bool {
    is_word(c) && !is_decimal(c)
}

/// Characters that a dash may follow.
fn joins(c: char) -> bool {
    is_word(c) || "!\"'&.,?".contains(c)
}

impl Wrapping {
    /// The lines of a line.
    fn wrap(&self, text: &[char]) -> Vec<String> {
        let mut chunks = if self.at_hyphens { chunks(text) } else { words(text) };
        chunks.reverse();
        let is_empty = |chunk: &[char]| chunk.iter().all(|c| is_space(*c));
        let mut lines: Vec<String> = Vec::new();
        while let Some(next) = chunks.last() {
            // 1. White space at the start of a line is dropped, but for the first
            if is_empty(next) && !lines.is_empty() {
                chunks.pop();
            }
            // 2. What fits
            let (mut line, mut length): (Vec<&[char]>, usize) = (Vec::new(), 0);
            while let Some(chunk) = chunks.pop_if(|chunk| length + chunk.len() <= self.width) {
                length += chunk.len();
                line.push(chunk);
            }
            // 3. A part of what fits no line
            if let Some(chunk) = chunks.pop_if(|chunk| chunk.len() > self.width) {
                if self.cuts_words {
                    let (first, rest) = chunk.split_at(self.cut(chunk, self.width - length));
                    line.push(first);
                    chunks.push(rest);
                } else if line.is_empty() {
                    line.push(chunk);
                } else {
                    chunks.push(chunk);
                }
            }
            // 4. White space at the end is dropped
            line.pop_if(|chunk| is_empty(chunk));
            if !line.is_empty() {
                lines.push(line.concat().into_iter().collect());
            }
        }
        lines
    }

    /// Where to cut a word that has this much room.
    fn cut(&self, chunk: &[char], room: usize) -> usize {
        let hyphen = chunk[..room].iter().rposition(|c| *c == '-').filter(|_| self.at_hyphens);
        let behind_a_word = hyphen.filter(|at| chunk[..*at].iter().any(|c| *c != '-'));
        behind_a_word.map_or(room, |at| at + 1)
    }
}

/// Words, and the white space between them.
fn words(text: &[char]) -> Vec<&[char]> {
    text.chunk_by(|a, b| is_blank(*a) == is_blank(*b)).collect()
}

/// The same, with words broken behind hyphens between letters and around dashes (`--`).
fn chunks(text: &[char]) -> Vec<&[char]> {
    let mut found = Vec::new();
    let mut begin = 0;
    while begin < text.len() {
        let end = chunk_end(text, begin);
        found.push(&text[begin..end]);
        begin = end;
    }
    found
}

fn chunk_end(text: &[char], begin: usize) -> usize {
    let is = |at: usize, what: fn(char) -> bool| text.get(at).is_some_and(|c| what(*c));
    let before = |at: usize, back: usize, what: fn(char) -> bool| at.checked_sub(back).is_some_and(|at| is(at, what));
    // The end of a dash that stands here between words.
    let dash_end = |at: usize| {
        let end = at + text[at..].iter().take_while(|c| **c == '-').count();
        (end >= at + 2 && is(end, is_word) && before(at, 1, joins)).then_some(end)
    };
    if is(begin, is_blank) {
        return begin + text[begin..].iter().take_while(|c| is_blank(**c)).count();
    }
    if let Some(end) = dash_end(begin) {
        return end;
    }
    for at in begin + 1..text.len() {
        if is(at, |c| c == '-') {
            let two_letters = before(at, 1, is_letter) && before(at, 2, is_letter);
            let joined = before(at, 1, joins) && before(at, 2, |c| c == '-') && before(at, 3, is_letter);
            let goes_on =
                is(at + 1, is_letter) && (is(at + 2, is_letter) || is(at + 2, |c| c == '-') && is(at + 3, is_letter));
            if (two_letters || joined) && goes_on {
                return at + 1;
            }
        }
        if is(at, is_blank) || dash_end(at).is_some() {
            return at;
        }
    }
    text.len()
}
