//! The filter `tojson` as in Transformers: Python's `json.dumps(x, ensure_ascii=False, …)`.
//!
//! Keys keep their order, `<` and `é` are not escaped, and a space follows each separator. Numbers are formatted as in
//! Python.

use std::fmt::Write as _;

use minijinja::value::{Kwargs, Value, ValueKind};
use minijinja::{Error, ErrorKind, State};

/// Largest nesting depth; deeper values are an error (Python fails at a depth of about a thousand).
const MAX_DEPTH: usize = 200;

/// The filter `tojson`.
pub(super) fn tojson(state: &State<'_, '_>, value: &Value, options: Kwargs) -> Result<String, Error> {
    let indent: Option<Value> = options.get("indent")?;
    let indent = match indent.filter(|indent| !indent.is_none()) {
        None => None,
        Some(indent) => match indent.as_str() {
            Some(text) => Some(text.to_owned()),
            None => Some(" ".repeat(u8::try_from(indent)?.into())),
        },
    };
    let separators: Option<Vec<String>> = options.get("separators")?;
    let (item, colon) = match separators.as_deref() {
        None if indent.is_some() => (",", ": "),
        None => (", ", ": "),
        Some([item, colon]) => (item.as_str(), colon.as_str()),
        Some(_) => return Err(invalid("tojson: separators must be a list of two strings")),
    };
    let ascii = options.get::<Option<bool>>("ensure_ascii")?.unwrap_or(false);
    let sort = options.get::<Option<bool>>("sort_keys")?.unwrap_or(false);
    options.assert_all_used()?;
    let mut writer = Writer { text: String::new(), indent: indent.as_deref(), item, colon, ascii, sort, state };
    writer.value(value, 0)?;
    Ok(writer.text)
}

fn invalid(detail: &'static str) -> Error {
    Error::new(ErrorKind::InvalidOperation, detail)
}

struct Writer<'a> {
    text: String,
    indent: Option<&'a str>,
    item: &'a str,
    colon: &'a str,
    ascii: bool,
    sort: bool,
    state: &'a State<'a, 'a>,
}

impl Writer<'_> {
    fn value(&mut self, value: &Value, depth: usize) -> Result<(), Error> {
        if depth > MAX_DEPTH {
            return Err(invalid("tojson: the value is nested more than 200 levels deep"));
        }
        self.state.consume_fuel(1)?;
        match value.kind() {
            ValueKind::None => self.text.push_str("null"),
            ValueKind::Bool => self.text.push_str(if value.is_true() { "true" } else { "false" }),
            ValueKind::Number if value.is_integer() => self.text.push_str(&value.to_string()),
            ValueKind::Number => self.text.push_str(&float(f64::try_from(value.clone())?)),
            ValueKind::String => self.string(value.as_str().unwrap_or_default())?,
            ValueKind::Seq | ValueKind::Iterable => {
                let mut empty = true;
                for item in value.try_iter()? {
                    self.text.push_str(if empty { "[" } else { self.item });
                    empty = false;
                    self.new_line(depth + 1);
                    self.value(&item, depth + 1)?;
                }
                self.close(empty, depth, "[]", "]");
            }
            ValueKind::Map => {
                let mut pairs = Vec::new();
                for key in value.try_iter()? {
                    let member = value.get_item(&key)?;
                    pairs.push((key_text(&key)?, member));
                }
                if self.sort {
                    pairs.sort_by(|(a, _), (b, _)| a.cmp(b));
                }
                let empty = pairs.is_empty();
                for (index, (key, member)) in pairs.iter().enumerate() {
                    self.text.push_str(if index == 0 { "{" } else { self.item });
                    self.new_line(depth + 1);
                    self.string(key)?;
                    self.text.push_str(self.colon);
                    self.value(member, depth + 1)?;
                }
                self.close(empty, depth, "{}", "}");
            }
            kind => {
                let detail = format!("tojson: a value of type {kind} is not JSON serializable");
                return Err(Error::new(ErrorKind::InvalidOperation, detail));
            }
        }
        Ok(())
    }

    fn new_line(&mut self, depth: usize) {
        if let Some(indent) = self.indent {
            self.text.push('\n');
            for _ in 0..depth {
                self.text.push_str(indent);
            }
        }
    }

    fn close(&mut self, empty: bool, depth: usize, both: &str, end: &str) {
        if empty {
            self.text.push_str(both);
        } else {
            self.new_line(depth);
            self.text.push_str(end);
        }
    }

    fn string(&mut self, text: &str) -> Result<(), Error> {
        self.state.consume_fuel(text.len() as u64 / 64)?;
        self.text.push('"');
        for character in text.chars() {
            match character {
                '"' => self.text.push_str("\\\""),
                '\\' => self.text.push_str("\\\\"),
                '\n' => self.text.push_str("\\n"),
                '\r' => self.text.push_str("\\r"),
                '\t' => self.text.push_str("\\t"),
                '\u{8}' => self.text.push_str("\\b"),
                '\u{c}' => self.text.push_str("\\f"),
                control if control < ' ' => self.unit(u32::from(control)),
                wide if self.ascii && !wide.is_ascii() => {
                    let mut units = [0; 2];
                    for unit in wide.encode_utf16(&mut units) {
                        self.unit(u32::from(*unit));
                    }
                }
                plain => self.text.push(plain),
            }
        }
        self.text.push('"');
        Ok(())
    }

    fn unit(&mut self, unit: u32) {
        // Writing to a string never fails.
        let _ = write!(self.text, "\\u{unit:04x}");
    }
}

/// Returns the text of an object's key: as in Python, numbers, booleans and `None` become text.
fn key_text(key: &Value) -> Result<String, Error> {
    match key.kind() {
        ValueKind::String => Ok(key.as_str().unwrap_or_default().to_owned()),
        ValueKind::None => Ok("null".to_owned()),
        ValueKind::Bool => Ok(if key.is_true() { "true" } else { "false" }.to_owned()),
        ValueKind::Number if key.is_integer() => Ok(key.to_string()),
        ValueKind::Number => Ok(float(f64::try_from(key.clone())?)),
        _ => Err(invalid("tojson: keys must be strings, numbers, booleans or none")),
    }
}

/// Formats a float like Python's `repr`: shortest digits, with an exponent from 1e16 up and below 1e-4.
pub(super) fn float(value: f64) -> String {
    if value.is_nan() {
        return "NaN".to_owned();
    }
    if value.is_infinite() {
        return if value > 0.0 { "Infinity" } else { "-Infinity" }.to_owned();
    }
    let scientific = format!("{value:e}");
    let (digits, exponent) = scientific.split_once('e').unwrap_or((&scientific, "0"));
    let exponent: i32 = exponent.parse().unwrap_or(0);
    if (-4..16).contains(&exponent) {
        format!("{value:?}")
    } else {
        let sign = if exponent < 0 { '-' } else { '+' };
        format!("{digits}e{sign}{:02}", exponent.abs())
    }
}

#[cfg(test)]
mod tests {
    use super::float;

    #[test]
    fn floats_are_written_as_python_writes_them() {
        for (value, text) in [
            (1.0, "1.0"),
            (-0.0, "-0.0"),
            (1.5, "1.5"),
            (0.1, "0.1"),
            (123_456_789.125, "123456789.125"),
            (9_007_199_254_740_993.0, "9007199254740992.0"),
            (1e15, "1000000000000000.0"),
            (1e16, "1e+16"),
            (1.25e22, "1.25e+22"),
            (1e-4, "0.0001"),
            (1.5e-5, "1.5e-05"),
            (5e-324, "5e-324"),
            (f64::MAX, "1.7976931348623157e+308"),
        ] {
            assert_eq!(float(value), text);
        }
    }
}
