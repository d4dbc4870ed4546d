//! Rewrites tags that the template engine lacks or treats differently from Jinja.
//!
//! `{% generation %}` marks the assistant's text for training and does not change the rendered text. It becomes a
//! `with` block, which has its own scope like the tag. `{% for x in y %}` is an error in Python if `y` is `None`, but
//! not in the template engine. So the iterated expression is passed through the filter [`ITERABLE`]. Line numbers do
//! not change. Comments, raw blocks and strings are not rewritten.

/// Name of the filter that returns an error for `None`.
pub(super) const ITERABLE: &str = "__iterable";

/// Returns the template with rewritten tags.
pub(super) fn rewrite(source: &str) -> String {
    let mut text = String::with_capacity(source.len() + 64);
    let mut rest = source;
    let mut raw = false;
    while let Some(at) = rest.find('{') {
        let (before, from) = rest.split_at(at);
        text.push_str(before);
        let end = match from.as_bytes().get(1) {
            Some(b'#') if !raw => from.find("#}").map(|end| end + 2),
            Some(b'{') if !raw => end_of(&from[2..], "}}").map(|end| end + 4),
            Some(b'%') => end_of(&from[2..], "%}").map(|end| end + 4),
            _ => Some(1),
        };
        // The template engine reports an unterminated tag.
        let Some(end) = end else {
            rest = from;
            break;
        };
        let (piece, after) = from.split_at(end);
        if piece.starts_with("{%") {
            let inside = &piece[2..piece.len() - 2];
            let body = inside.trim_start_matches(['-', '+']).trim_start();
            let lead = &inside[..inside.len() - body.len()];
            let word = first_word(body);
            text.push_str("{%");
            text.push_str(lead);
            match word {
                "endraw" => raw = false,
                "raw" => raw = true,
                _ => {}
            }
            if raw || !push_rewritten(word, body, &mut text) {
                text.push_str(body);
            }
            text.push_str("%}");
        } else {
            text.push_str(piece);
        }
        rest = after;
    }
    text.push_str(rest);
    text
}

/// Appends the rewritten body of a tag to `text`; returns false if the tag is not rewritten.
fn push_rewritten(word: &str, body: &str, text: &mut String) -> bool {
    let after = &body[word.len()..];
    match word {
        "generation" | "endgeneration" if after.trim_matches(['-', '+', ' ', '\t', '\n', '\r']).is_empty() => {
            text.push_str(if word == "generation" { "with" } else { "endwith" });
            text.push_str(after);
            true
        }
        "for" => {
            let Some(start) = keyword(after, &["in"]).map(|at| at + 2) else { return false };
            let tail = &after[start..];
            let end = keyword(tail, &["if", "recursive"]).unwrap_or_else(|| {
                let bare = tail.trim_end();
                bare.strip_suffix(['-', '+']).unwrap_or(bare).len()
            });
            let (expression, rest) = tail.split_at(end);
            let bare = expression.trim();
            if bare.is_empty() {
                return false;
            }
            // The surrounding white space is kept, because it may contain line breaks.
            let (before, after) = (expression.len() - expression.trim_start().len(), expression.trim_end().len());
            text.push_str(&body[..word.len() + start]);
            text.push_str(&expression[..before]);
            text.push('(');
            text.push_str(bare);
            text.push_str(")|");
            text.push_str(ITERABLE);
            text.push_str(&expression[after..]);
            text.push_str(rest);
            true
        }
        _ => false,
    }
}

fn is_word(byte: u8) -> bool {
    byte.is_ascii_alphanumeric() || byte == b'_' || byte >= 0x80
}

fn first_word(text: &str) -> &str {
    &text[..text.bytes().take_while(|&byte| is_word(byte)).count()]
}

/// Searches code outside strings: returns the first position for which `stop(position, bracket depth)` is true.
fn walk(code: &str, mut stop: impl FnMut(usize, usize) -> bool) -> Option<usize> {
    let bytes = code.as_bytes();
    let (mut at, mut depth) = (0, 0_usize);
    while at < bytes.len() {
        if stop(at, depth) {
            return Some(at);
        }
        match bytes[at] {
            quote @ (b'"' | b'\'') => {
                at += 1;
                while at < bytes.len() && bytes[at] != quote {
                    at += if bytes[at] == b'\\' { 2 } else { 1 };
                }
            }
            b'(' | b'[' | b'{' => depth += 1,
            b')' | b']' | b'}' => depth = depth.saturating_sub(1),
            _ => {}
        }
        at += 1;
    }
    None
}

/// Returns the position of the closing mark. A `}` that closes a dict does not end an expression.
fn end_of(code: &str, mark: &str) -> Option<usize> {
    walk(code, |at, depth| depth == 0 && code.as_bytes()[at..].starts_with(mark.as_bytes()))
        // Unbalanced brackets are an error in any case; end at the first mark, so that the template engine reports the
        // error.
        .or_else(|| code.find(mark))
}

/// Returns the position of the first of the words outside brackets and strings.
fn keyword(code: &str, words: &[&str]) -> Option<usize> {
    let bytes = code.as_bytes();
    walk(code, |at, depth| {
        depth == 0
            && (at == 0 || !is_word(bytes[at - 1]) && bytes[at - 1] != b'.')
            && is_word(bytes[at])
            && code.is_char_boundary(at)
            && words.contains(&first_word(&code[at..]))
    })
}

#[cfg(test)]
mod tests {
    use super::rewrite;

    #[test]
    fn the_generation_tag_becomes_a_block() {
        assert_eq!(
            rewrite("a{%- generation -%}\n b {%endgeneration%}c{{ generation }}"),
            "a{%- with -%}\n b {%endwith%}c{{ generation }}"
        );
    }

    #[test]
    fn loops_check_what_they_iterate() {
        for (source, expected) in [
            ("{% for t in tools %}", "{% for t in (tools)|__iterable %}"),
            ("{%- for t in tools -%}", "{%- for t in (tools)|__iterable -%}"),
            ("{%for k, v in x.items() if v != ' if '%}", "{%for k, v in (x.items())|__iterable if v != ' if '%}"),
            ("{% for x in (a if b else c) recursive %}", "{% for x in ((a if b else c))|__iterable recursive %}"),
            ("{% for in_x in x.if_y %}", "{% for in_x in (x.if_y)|__iterable %}"),
            ("{% for x in ['%}', \"if\"] %}", "{% for x in (['%}', \"if\"])|__iterable %}"),
            ("{% for x\nin\ny\n%}", "{% for x\nin\n(y)|__iterable\n%}"),
        ] {
            assert_eq!(rewrite(source), expected);
        }
    }

    #[test]
    fn everything_else_stays() {
        for other in [
            "{% if generation %}x{% endif %}",
            "{% set generation = 1 %}",
            "{% generations %}",
            "{# {% for x in y %} #}",
            "{% raw %}{% for x in y %}{{ '{%' }}{% endraw %}",
            "{{ '{% for x in y %}' }}",
            "{{ {'a': {'b': 1}} }}",
            "{%",
            "{",
            "{{ 'open",
            "é{% ",
            "{% for x in %}",
            "{% for x of y %}",
            "{% for 'é",
        ] {
            assert_eq!(rewrite(other), other);
        }
    }
}
